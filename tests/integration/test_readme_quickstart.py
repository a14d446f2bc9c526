"""The quickstart of README.md works as typed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

README = ROOT / "README.md"


def quickstart():
    """Return the commands of the quickstart but the first, which installs syncd."""
    section = README.read_text().split("\n## Quickstart\n")[1]
    block = re.search(r"(?:^ {4}.*\n)+", section, re.MULTILINE)[0]
    first, *commands = re.sub(r"^ {4}", "", block, flags=re.MULTILINE).splitlines()
    assert first.startswith("pip install -e . ")
    return "\n".join(commands)


def test_every_command_of_the_quickstart_succeeds(tmp_path):
    script = f"set -e\nset -m\n{quickstart()}\nwait\n".replace("/tmp/", f"{tmp_path}/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = re.findall(r"# prints (\d+\.\d+)", quickstart())
    assert [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line)] == expected
