"""Supervised training: what is published while somebody follows or nobody does, and what stays at the end."""

import contextlib
import json
import os
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

import torch
from safetensors.torch import load_file
from support.trainers import make_trainer, small_config

from syncd.errors import ConfigError
from syncd.protocol.job_end import read_end
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.synchronizer import RunningStatus, Synchronizer
from syncd.views.documents import status
from syncd.views.job_view import JobViewer
from trainer import validation
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
    return trained(config)[0]


def trained(config):
    """Train; return the exit code and the figures by step."""
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync)
        made.prepare()
        try:
            return made.train(), dict(shown.records)
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


def validated(job, tmp_path, rows, interval):
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps({"tokens": row, "prompt_length": 2}) + "\n" for row in rows))
    config = configured(job, trainer={"validation_interval": interval, "save_interval": 4}, dtype="float32")
    return config.with_values(data={"validation_path": str(path)})


def weights_of(job):
    (file,) = (job / "global_step_6" / "actor").glob("*.safetensors")
    return load_file(file)


def test_the_loss_of_validation_is_a_mean_over_tokens_and_changes_nothing(tmp_path, monkeypatch):
    """The bigram model of the last step, by hand; rows in several questions; the weights of a run without it."""
    monkeypatch.setattr(validation, "MOST_ROWS", 2)
    rows = [[1, 2, 3], [5, 6, 7, 8, 9], [4, 4, 4, 4], [7, 1, 2], [9, 9, 0]]
    code, figures = trained(validated(tmp_path / "job", tmp_path, rows, 4))
    losses = {step: has["validation/loss"] for step, has in figures.items() if "validation/loss" in has}
    assert (code, losses.keys()) == (0, {4, 6}), "at the interval, and at the end"
    weights = weights_of(tmp_path / "job")
    embed = weights["model.embed.weight"].float()
    nats = []
    for row in rows:
        layer, bias = (weights[f"model.layer.{name}"].float() for name in ("weight", "bias"))
        found = (torch.tanh(embed[row[:-1]] @ layer.T + bias) @ embed.T).log_softmax(-1)
        nats += [-float(found[at, row[at + 1]]) for at in range(1, len(row) - 1)]
    assert losses[6] == pytest.approx(sum(nats) / len(nats), rel=1e-6)
    assert len(nats) == 8
    assert run(configured(tmp_path / "plain", trainer={"save_interval": 4}, dtype="float32")) == 0
    plain = weights_of(tmp_path / "plain")
    assert all(torch.equal(weights[name], plain[name]) for name in weights)


def test_examples_of_validation_that_the_model_cannot_take_are_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="example 2"):
        run(validated(tmp_path / "job", tmp_path, [[1, 2, 3], [1, 2, 99]], 1))


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
