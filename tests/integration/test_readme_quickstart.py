"""The quickstart of README.md works as typed, and `make` alone says what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

README = ROOT / "README.md"


def quickstart():
    """Return the commands of the quickstart."""
    section = README.read_text().split("\n## Quickstart\n")[1]
    block = re.search(r"(?:^ {4}.*\n)+", section, re.MULTILINE)[0]
    return re.sub(r"^ {4}", "", block, flags=re.MULTILINE)


def test_every_command_of_the_quickstart_succeeds(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-em", "-c", f"{quickstart()}wait\n"],
        check=False,
        env=os.environ | {"PATH": path, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = re.findall(r"# prints (\d+\.\d+)", quickstart())
    assert [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line)] == expected
    assert re.search(r"/job/global_step_2/actor 1\.2\b", done.stdout), "what the hook's command printed"


def test_make_alone_lists_every_target_in_one_line_each():
    # A make that runs the tests tells those that it starts so, and they then name the directory.
    alone = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    }
    done = subprocess.run(
        ["make"], cwd=ROOT, env=alone, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    listed = [line.split(None, 1) for line in done.stdout.splitlines()[1:]]
    assert [name for name, _ in listed] == targets
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
