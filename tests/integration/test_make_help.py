"""`make` alone says what there is."""

import os
import re
import subprocess

from support.paths import ROOT


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
