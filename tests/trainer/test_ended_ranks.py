"""A rank that another process kills: the others end with an error that says so, and none with a bug."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support import matrices
from support.checker import marker
from support.job_file import tiny_job, write_job
from support.trainers import ENVIRONMENT, write_experiences

from syncd.transports.ranks import lost_rank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rank_of(process, number):
    """Return the pid of a rank that a trainer has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children:
            if f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return int(pid)
        time.sleep(0.1)
    raise AssertionError(f"no rank {number}")


@pytest.mark.parametrize("number", matrices.rows([0, 1], 0))
def test_a_killed_rank_is_no_bug_of_the_other_one(tmp_path, number):
    job = str(tmp_path / "job")
    os.mkdir(job)
    write_experiences(job, 50)
    engine, steps = {"options": {"pause": 0.5}}, {"nproc": 2, "total_steps": 50}
    write_job(f"{job}.toml", tiny_job(job, engine=engine, trainer=steps))
    command = [sys.executable, "-m", "trainer", "train", f"{job}.toml"]
    process = subprocess.Popen(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while (marker(job) or 0) < 1:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        os.kill(rank_of(process, number), signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL, output
    assert f"rank {number}" in output
    assert "was killed by SIGKILL" in output
    assert "Traceback" not in output, output
    assert "bug" not in output


def test_errors_of_collectives_are_told_from_others():
    closed = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
    )
    assert lost_rank(closed).exit_code == 4
    assert lost_rank(RuntimeError("shapes differ")) is None
    assert lost_rank(ValueError("gloo/")) is None
