"""A whole job by deltas: trainer, daemon and a follower with a stage; the trainer is killed and resumes."""

import contextlib
import json
import os
import signal
import time
from glob import glob

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("pyarrow", reason="deltas need pyarrow")

from support.delta_saves import form_of
from support.job_file import tiny_job, write_job
from support.trainers import write_experiences
from support.waiting import until
from support.whole_jobs import RANK, ended, free_port, logs, program

from syncd.protocol.layout import Job
from syncd.protocol.presence import read_presences
from syncd.protocol.version import read_marker, read_version
from syncd.transports.delta.materialise import prove
from trainer.checkpoints import latest_hf_directory
from trainer.stopping import STOPPED

pytestmark = pytest.mark.slow

LIMIT = 150.0
STEPS = 16
FIRST_DIES, SECOND_STOPS = 8, 10
OWN = {
    "engine": {"options": {"pause": 0.3, "vocab": 4000}},
    "algorithm": {"optimizer": {"lr": 1e-5}},
    "data": {"end_when_left": False},
    "sync": {"delta": "on", "keyframe_every": 4},
    "trainer": {"nproc": 1, "save_interval": 6, "total_steps": STEPS, "start_daemon": False},
}


def test_a_follower_reads_what_a_trainer_that_is_killed_and_stopped_stores_as_deltas(tmp_path):
    path, place = str(tmp_path / "job"), str(tmp_path)
    os.mkdir(path)
    write_job(tmp_path / "job.toml", tiny_job(path, **OWN))
    write_experiences(path, STEPS + 6)
    job = Job.at(path)

    def train(running):
        command = ("-m", "trainer", "train", f"{place}/job.toml")
        environ = RANK | {"MASTER_PORT": str(free_port())}
        return running.enter_context(program(place, f"trainer-{time.monotonic_ns()}", *command, **environ))

    def published():
        version = read_version(job)
        return version.pair if version else (0, 0)

    def applied():
        found = read_presences(job.disk, job.explorers)[0].get("reader")
        return found.applied[1] if found and found.applied else -1

    with contextlib.ExitStack() as running:
        running.enter_context(program(place, "daemon", "-m", "syncd", "watch", path, "--keep-last", "99"))
        load = ("--hook", "command", "--stage", f"{place}/stage", "--name", "reader", "--stay")
        check = ("--", "/bin/sh", "-c", "ls {path}/*.safetensors")
        running.enter_context(program(place, "follower", "-m", "syncd", "follow", path, *load, *check))
        first = train(running)
        until(lambda: (read_marker(job.disk, job.marker).step or 0) >= FIRST_DIES, lambda: logs(place))
        first.kill()
        assert ended(first, time.monotonic() + LIMIT) == -signal.SIGKILL
        second = train(running)
        until(lambda: published() >= (2, SECOND_STOPS), lambda: logs(place))
        os.kill(second.pid, signal.SIGTERM)
        assert ended(second, time.monotonic() + LIMIT) == STOPPED, logs(place)
        stopped_at = int(job.disk.read(job.tracker))
        assert stopped_at >= SECOND_STOPS
        assert glob(f"{latest_hf_directory(job)}/model-*.safetensors"), "whole, however the step is stored"
        third = train(running)
        assert ended(third, time.monotonic() + LIMIT) == 0, logs(place)
        until(lambda: applied() == STEPS, lambda: logs(place))

    forms = {step: form_of(job, step) for step in range(1, STEPS + 1)}
    assert all(prove(job, step) == [] for step in forms), forms
    assert forms[6] in ("whole", "shortcut"), "a full checkpoint"
    assert "delta" in forms.values(), logs(place)
    assert "shortcut" in forms.values(), logs(place)
    with open(f"{job.step(STEPS)}/manifest.json", encoding="utf-8") as file:
        assert json.load(file)["kind"] == "weights", "the last step is a full checkpoint"
