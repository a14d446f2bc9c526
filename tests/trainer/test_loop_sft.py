"""Supervised training: what is published while somebody follows or nobody does, and what stays at the end."""

import contextlib
import json
import os
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.trainers import make_trainer, small_config

from syncd.protocol.job_end import read_end
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.synchronizer import RunningStatus, Synchronizer
from syncd.views.data import status
from syncd.views.job_view import JobViewer
from trainer.launch import daemon as beside
from trainer.launch.daemon import start_daemon


def configured(job, *, trainer=None, **sync):
    job.mkdir(exist_ok=True)
    path = job / "examples.jsonl"
    path.write_text("".join(json.dumps({"tokens": [n, 1, 2], "prompt_length": 1}) + "\n" for n in range(8)))
    return small_config(
        job,
        algorithm={"name": "sft"},
        data={"sft_path": str(path)},
        trainer={"total_steps": 6, "save_interval": 3} | (trainer or {}),
        sync=sync,
    )


def finished(config):
    """Return what `syncd status` says of the end of a job."""
    return status(JobViewer(Job.at(config.job.dir), SystemClock()).read())["finished"]


def run(config):
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, _ = make_trainer(config, sync)
        made.prepare()
        try:
            return made.train()
        finally:
            made.shutdown()


def steps(job):
    return sorted(int(name[12:]) for name in os.listdir(job) if name.startswith("global_step_"))


def full(job):
    return [step for step in steps(job) if os.path.exists(f"{job}/global_step_{step}/.full_checkpoint")]


@contextlib.contextmanager
def explorer(job):
    with Synchronizer.open(job, "explorer", "e0") as sync:
        sync.set_explorer_status(RunningStatus.REQUIRE_SYNC)
        yield


def test_without_explorers_only_full_checkpoints_are_written(tmp_path):
    assert run(configured(tmp_path / "job")) == 0
    assert steps(tmp_path / "job") == full(tmp_path / "job") == [3, 6]


def test_each_step_is_published_while_an_explorer_lives(tmp_path):
    config = configured(tmp_path / "job")
    with explorer(config.job.dir):
        assert run(config) == 0
    assert steps(tmp_path / "job") == [1, 2, 3, 4, 5, 6]


def test_an_explicit_interval_applies_while_an_explorer_lives(tmp_path):
    config = configured(tmp_path / "job", interval=2)
    with explorer(config.job.dir):
        assert run(config) == 0
    assert steps(tmp_path / "job") == [2, 3, 4, 6]


def test_sync_unwatched_publish_publishes_without_explorers(tmp_path):
    assert run(configured(tmp_path / "job", unwatched="publish")) == 0
    assert steps(tmp_path / "job") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [4, 6])])
def test_a_finished_job_keeps_max_checkpoints_to_keep_and_no_trash(tmp_path, keep, left):
    trainer = {"save_interval": 2, "max_checkpoints_to_keep": keep}
    config = configured(tmp_path / "job", trainer=trainer)
    daemon = start_daemon(config)
    assert run(config) == 0
    daemon.close(tidy=True)
    assert full(tmp_path / "job") == steps(tmp_path / "job") == left
    assert trash(tmp_path / "job") == []


def trash(job):
    return [
        f"{place}/{name}"
        for place, names, _ in os.walk(f"{job}/.syncd/trash")
        for name in names
        if "step" in name
    ]


def test_a_daemon_that_another_process_runs_is_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "EVERY", 0.05)
    config = configured(tmp_path / "job", trainer={"save_interval": 2, "max_checkpoints_to_keep": 1})
    leading, other = start_daemon(config), None
    try:
        while leading._candidate.holder() is None:
            time.sleep(0.05)
        other = start_daemon(config)
        assert run(config) == 0
        other.close(tidy=True)
        assert leading.pid is not None
    finally:
        leading.close()


def test_a_failed_cleanup_is_reported_with_the_command_to_run(tmp_path, monkeypatch, capsys):
    config = configured(tmp_path / "job")
    daemon = start_daemon(config)
    assert run(config) == 0
    monkeypatch.setattr(beside, "TIDYING", 0.0)
    daemon.close(tidy=True)
    said = capsys.readouterr().out
    assert "job_cleanup_failed" in said
    assert "syncd prune" in said


def test_the_end_of_a_job_is_recorded_and_removed_by_a_later_start(tmp_path):
    config = configured(tmp_path, trainer={"total_steps": None, "save_interval": 0}, unwatched="skip")
    config = config.model_copy(update={"data": config.data.model_copy(update={"epochs": 1})})
    assert run(config) == 0
    end = read_end(Job.at(tmp_path))
    assert (end.step, end.reason) == (2, "all epochs done")
    assert finished(config) == {"step": 2, "reason": "all epochs done"}
    longer = config.model_copy(update={"data": config.data.model_copy(update={"epochs": 2})})
    with Synchronizer.open(tmp_path, "trainer", poll=0.01) as sync:
        made, _ = make_trainer(longer, sync)
        made.prepare()
        assert read_end(Job.at(tmp_path)) is None
        assert finished(config) is None
        assert made.train() == 0
        made.shutdown()
    assert read_end(Job.at(tmp_path)).step == 4
