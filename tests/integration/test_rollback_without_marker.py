"""A rollback in a job that has no marker file: it holds until the trainer has something new, and no longer."""

import os
from dataclasses import replace

import pytest
from support.foreign_jobs import SAMPLES
from support.jobs import start, write_step

from syncd.protocol.layout import Job
from syncd.protocol.request import Request, write_request
from syncd.protocol.version import read_version, write_marker

SETTLED = 10.0
"""Seconds after which what stands still counts."""


class Foreign:
    """A trainer that lays its steps out like one sample; verl's names them in its tracker."""

    def __init__(self, job, sample):
        self._job, self._sample = job, sample
        self._stem = sample.directory.rstrip("0123456789")

    def write(self, step):
        replace(self._sample, directory=f"{self._stem}{step}").place(self._job.root)
        if self._sample.announced_by == "marker":
            write_marker(self._job.disk, self._job.tracker, step)


class Native:
    """A trainer of this protocol whose marker file is not there."""

    def __init__(self, job):
        self._job = job

    def write(self, step):
        write_step(self._job, step, announce=False)


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


FAMILIES = {sample.layout: sample for sample in SAMPLES}
"""A sample of each layout."""


@pytest.fixture(params=[*FAMILIES.values(), None], ids=lambda sample: sample.layout if sample else "syncd")
def trainer(request, job):
    return Foreign(job, request.param) if request.param else Native(job)


@pytest.fixture
def daemon(job):
    """Return a daemon that has published whatever there is to publish."""
    made, _, clock = start(job, prune=False)
    return lambda: published(job, made, clock)


def published(job, daemon, clock):
    for _ in range(3):
        daemon.tick(woken=True)
        assert daemon.error is None
        clock.at += SETTLED
    return read_version(job).pair


def rolled_back(job, trainer, daemon):
    for step in (5, 7):
        trainer.write(step)
    assert daemon() == (1, 7)
    write_request(job, Request("rollback", 5))
    assert daemon() == (2, 5)


def test_a_rollback_holds_until_the_trainer_completes_a_new_step(job, trainer, daemon):
    rolled_back(job, trainer, daemon)
    again, _, clock = start(job, prune=False)
    assert published(job, again, clock) == (2, 5)
    again.close()
    trainer.write(8)
    assert daemon() == (2, 8)


def test_a_rollback_ends_when_the_trainer_completes_an_intermediate_step(job, trainer, daemon):
    rolled_back(job, trainer, daemon)
    trainer.write(6)
    assert daemon() == (2, 6)


def test_a_repaired_step_does_not_end_the_hold_of_a_rollback(job, daemon):
    trainer = Native(job)
    for step in (5, 7):
        trainer.write(step)
    assert daemon() == (1, 7)
    shard = f"{job.step(7)}/actor/model-00001-of-00001.safetensors"
    os.rename(shard, f"{job.root}/aside")
    write_request(job, Request("rollback", 5))
    assert daemon() == (2, 5)
    os.rename(f"{job.root}/aside", shard)
    assert daemon() == (2, 5)
