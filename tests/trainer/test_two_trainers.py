"""Two real trainers on one job: the second is refused, whatever its name, unless the first is stopped."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.checker import marker
from support.job_file import tiny_job, write_job
from support.trainers import write_experiences
from support.whole_jobs import alone

from trainer.monitors.jsonl import read_history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(job, name="trainer", *, pause=0.0, interval=5):
    path = f"{job}.{name}.toml"
    trainer = {"name": name, "nproc": 1, "total_steps": 6, "save_interval": interval}
    engine, data = {"options": {"pause": pause}}, {"consumed": "archive"}
    write_job(path, tiny_job(job, engine=engine, data=data, trainer=trainer))
    return alone(f"{path}.log", path)


def until_marked(job, step, process):
    deadline = time.monotonic() + 300
    while (marker(job) or 0) < step:
        assert process.poll() is None, process.said()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_trainer_process_is_refused_under_any_identity(tmp_path):
    job = str(tmp_path / "job")
    os.mkdir(job)
    write_experiences(job, 3)
    first = start(job)
    try:
        until_marked(job, 3, first)
        second = start(job, "another-name")
        assert second.wait(300) == 5, second.said()
        output = second.said()
        assert "another trainer trains this job" in output
        assert "identity" not in output
        write_experiences(job, 3, "e1")
        assert first.wait(300) == 0, first.said()
        assert marker(job) == 6
    finally:
        first.end()


def left(job):
    """Return what a replaced trainer could still change."""
    job = Path(job)
    files = ["metrics.jsonl", "latest_checkpointed_iteration.txt", "trainer_meta.json", ".full_checkpoint"]
    paths = [job / name for name in files] + sorted((job / ".syncd/trainers").iterdir())
    return {path.name: path.read_bytes() for path in paths if path.is_file()} | {
        "steps": sorted(path.name for path in job.glob("global_step_*"))
    }


def test_a_stopped_trainer_of_this_host_is_replaced_and_harms_nothing_when_it_wakes_up(tmp_path):
    job = str(tmp_path / "job")
    os.mkdir(job)
    write_experiences(job, 6)
    first = start(job, pause=1.5, interval=1)
    try:
        until_marked(job, 3, first)
        first.send_signal(signal.SIGSTOP)
        second = start(job, interval=1)
        assert second.wait(400) == 0, second.said()
        assert "earlier_trainer_watched" in second.said()
        assert marker(job) == 6
        before = left(job)
        assert len(read_history(f"{job}/metrics.jsonl").steps) == 6
        first.send_signal(signal.SIGCONT)
        assert first.wait(300) == 75, first.said()
        assert left(job) == before
    finally:
        first.end()
