"""What explorers, storage and rank 0 do wrong: a run goes on, or ends with what it has on disk."""

import contextlib

import pytest
import torch
from trainers import make_trainer, rollout, small_config

from syncd.experience import places
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.synchronizer import Synchronizer

BAD_TOKEN = 64
"""The first token id that the tiny engine's model does not have."""


@contextlib.contextmanager
def trainer(config, **options):
    """Yield a trainer that is ready, and what it shows."""
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync, **options)
        made.prepare()
        try:
            yield made, shown
        finally:
            made.shutdown()


def run(config, **options):
    """Train to the end; return the exit code and what was shown."""
    with trainer(config, **options) as (made, shown):
        return made.train(), shown


def batch_of(step):
    return [rollout(step, group, number) for group in range(2) for number in range(2)]


def with_bad_token(experience):
    fields = {name: getattr(experience, name) for name in experience.__slots__}
    return Experience(**fields | {"tokens": [1, 5, 6, BAD_TOKEN]})


def fill(job, steps, bad=()):
    """Write batches, those numbered in `bad` with a token that the model does not have in their last row."""
    job.mkdir(exist_ok=True)
    with ExperienceWriter(Job.at(job), "e0") as writer:
        for number in range(1, steps + 1):
            rows = batch_of(number)
            writer.write([*rows[:-1], with_bad_token(rows[-1])] if number in bad else rows)


def weights(job, step):
    return torch.load(f"{job}/global_step_{step}/training/tiny_0_of_1.pt")


def same(one, other):
    """Compare two training states bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_batch_that_the_model_cannot_take_is_set_aside(tmp_path, capsys):
    job = tmp_path / "job"
    fill(job, 6, bad={2})
    code, shown = run(small_config(job))
    assert code == 0
    assert [step for step, _ in shown.records] == [1, 2, 3, 4]
    assert places.numbers(Job.at(job), places.rejected(Job.at(job), "e0")) == {2}
    said = capsys.readouterr().out
    assert "experience_rejected" in said
    assert "e0" in said
    assert "2.parquet" in said
    assert "token 64 for a model of 64 tokens" in said


@pytest.mark.parametrize("bad", [{2}, {3}])
def test_a_resume_beside_a_bad_batch_is_exactly_going_straight_through(tmp_path, bad):
    states = {}
    for name, totals in {"straight": [4], "twice": [2, 4]}.items():
        job = tmp_path / name
        fill(job, 7, bad=bad)
        for total in totals:
            assert run(small_config(job, trainer={"total_steps": total}))[0] == 0
        states[name] = weights(job, 4)
    assert same(states["straight"], states["twice"])
