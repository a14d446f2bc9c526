"""A follower as it was before deltas, from this repository's history, on a job of the present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_follow_deltas import DeltaScene

BEFORE_DELTAS = "698f50b"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def older(tmp_path):
    """The directory of the older release."""
    place = tmp_path / "older"
    place.mkdir()
    found = subprocess.run(
        ["git", "-C", ROOT, "archive", BEFORE_DELTAS, "syncd", "explorer_hooks"],
        check=False,
        capture_output=True,
    )
    if found.returncode:
        pytest.skip(f"the history of this checkout does not have {BEFORE_DELTAS}")
    subprocess.run(["tar", "x", "-C", place], input=found.stdout, check=True)
    return place


def test_a_follower_of_an_older_release_refuses_a_delta_and_says_why(tmp_path, older):
    scene = DeltaScene(tmp_path / "job")
    scene.chain(2)
    command = [
        "-m",
        "syncd",
        "follow",
        str(scene.root),
        "--hook",
        "command=true",
        "--once",
        "--timeout",
        "60",
    ]
    environment = {**os.environ, "PYTHONPATH": str(older)}
    found = subprocess.run(
        [sys.executable, *command], check=False, env=environment, cwd=older, capture_output=True, text=True
    )
    assert found.returncode == 65, found.stderr
    assert "step 2 is of kind delta; this hook loads" in found.stderr.splitlines()[-1]
    scene.close()
