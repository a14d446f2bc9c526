"""Tests that must not run side by side are in one group, and one worker runs a group."""

import os
import re
import subprocess
import sys

import pytest
from support.paths import PYTHONPATH, TESTS

pytest.importorskip("xdist.scheduler", reason="pytest-xdist is not installed")

MOUNTS = re.compile(r'\["(?:mount|unshare)"|\bmounted\(|nfs_bed\b|probe\.(?:slurm|systemd|quota)')
"""What a test does that mounts a file system or boots a machine."""

GROUPS = """
import pytest


@pytest.mark.parametrize("number", range(6))
@pytest.mark.group("one")
def test_of_one_group(number, worker_id, tmp_path_factory):
    print("ran", "one", worker_id)


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.group("v1")), pytest.param(2)])
@pytest.mark.parametrize("number", range(3))
def test_of_a_group_by_parameter(number, version, worker_id):
    print("ran", f"v{version}" if version == 1 else f"alone-{number}", worker_id)


@pytest.fixture(scope="module")
def shared():
    return 1


@pytest.mark.parametrize("number", range(4))
def test_of_what_a_module_shares(shared, number, worker_id):
    print("ran", "shared", worker_id)
"""


def test_every_file_that_mounts_has_a_group_mark():
    found = {path for path in TESTS.rglob("test_*.py") if MOUNTS.search(path.read_text())}
    assert len(found) >= 16
    without = {path.name for path in found if "pytest.mark.group(" not in path.read_text()}
    assert without == set()


@pytest.mark.slow
def test_one_worker_runs_all_tests_of_a_group(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    group(name): one\n    sweep:\n    slow:\n")
    (tmp_path / "test_groups.py").write_text(GROUPS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "3",
        "-rP",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    ran = re.findall(r"ran (\S+) (gw\d)", done.stdout)
    workers = {group: {worker for name, worker in ran if name == group} for group, _ in ran}
    assert len(ran) == 16
    assert len(workers["one"]) == len(workers["v1"]) == len(workers["shared"]) == 1
    assert len({worker for _, worker in ran}) > 1
