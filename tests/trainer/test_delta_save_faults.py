"""Saves of deltas and of keyframes with shortcuts that fail or die at any of their calls.

The trainer that failed, and the one that takes the place of the one that was killed, go on: what they store next is
bit for bit what whole saves of the same weights are. SYNCD_SWEEP=full has every call; else there are a few of each.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("pyarrow", reason="deltas need pyarrow")

from support import checker  # noqa: E402
from support.delta_saves import DeltaTrainer, assert_same, explorer, form_of  # noqa: E402
from support.failing_calls import Fault  # noqa: E402
from support.processes import FULL  # noqa: E402

from syncd.errors import SyncdError  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.presence import READS_DELTA  # noqa: E402
from syncd.transports.delta import share  # noqa: E402

FEW = 11
"""Of so many calls one meets a fault in `make test`."""

CHECKPOINT = {"delta": "", "shortcut": "it is a full checkpoint"}
"""Why a step may not be stored as a delta alone, by how it is stored."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class SmallWeights:
    """Tensors of a few kilobytes that make several tiles, and what training changes of them."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.tensors = {
            name: torch.randn(40_000) * 0.02 if number % 2 else torch.arange(50)
            for number, name in enumerate(("ids", "embed", "map", "layer", "order", "norm"))
        }

    def train(self):
        for values in self.tensors.values():
            values[torch.rand(values.shape) < 0.03] += 1 if values.dtype == torch.int64 else 0.001
        return self

    def export(self):
        return self.tensors.items()


def is_sealed(job, step):
    return os.path.exists(f"{job.step(step)}/manifest.json")


def calls(first):
    """Return the numbers of the calls that meet a fault, from 1; where there are a few, from another one."""
    return itertools.count(1) if FULL else itertools.count(first, FEW)


@pytest.mark.fault("the trainer's base is ahead of a save that failed")
@pytest.mark.parametrize("form", CHECKPOINT)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_after_an_error_at_any_call_the_trainer_goes_on(tmp_path, form, error, record_line):
    trainer, weights, steps = DeltaTrainer(str(tmp_path)), SmallWeights(1), itertools.count(1)
    reader = explorer(trainer.job, "reader", READS_DELTA)
    forms, met, failed, sealed = [], [], 0, 0
    trainer.store(next(steps), weights.export)
    for at in calls(1):
        reader.beat()
        step = next(steps)
        trainer.store(step, weights.train().export)
        forms.append(form_of(trainer.job, step))
        assert_same(str(tmp_path), step, str(tmp_path))
        step = next(steps)
        trainer.store_whole(step, weights.train().export)
        fault = Fault(trainer.job.root, error, at)
        try:
            with fault:
                trainer.store_changes(step, weights.export, CHECKPOINT[form])
        except SyncdError:
            failed += 1
            sealed += is_sealed(trainer.job, step)
        else:
            assert is_sealed(trainer.job, step), fault.met
        trainer.daemon.tick()
        if is_sealed(trainer.job, step):
            assert_same(str(tmp_path), step, str(tmp_path))
        assert checker.problems(trainer.job.root) == [], fault.met
        if not fault.met:
            break
        met.append(fault.met.partition(" ")[0])
    assert form_of(trainer.job, step) == form
    assert "whole" not in forms, "what the trainer has kept is not lost by an error"
    assert failed > len(forms) // 2
    assert not FULL or form == "delta" or "fallocate" in met
    record_line(
        f"{error} at {len(forms) - 1} calls of a save as a {form}: {failed} fail, {sealed} of them sealed"
    )
    trainer.close()


def save_until(place, form, killed_by):
    """Store three steps after those that are there, as a new process does; the last of them may kill it."""
    torch.set_num_threads(1)
    trainer = DeltaTrainer(place)
    first = max(checker.sealed(trainer.job.root), default=0) + 2
    weights = SmallWeights(first)
    explorer(trainer.job, "reader", READS_DELTA)
    for step in (first, first + 1):
        trainer.store(step, weights.train().export)
    trainer.store_whole(first + 2, weights.train().export)
    with killed_by(trainer.job):
        trainer.store_changes(first + 2, weights.export, CHECKPOINT[form])
    trainer.daemon.tick()
    trainer.close()


@contextlib.contextmanager
def dies_before_frame(number):
    """Kill this process where it would encode a frame."""

    def encode(*given, **more):
        nonlocal number
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **more)

    original, share.encode = share.encode, encode
    yield
    share.encode = original


@pytest.mark.parametrize("form", CHECKPOINT)
@pytest.mark.parametrize("kind", ["call", "frame"])
def test_whoever_follows_a_trainer_that_was_killed_goes_on(tmp_path, form, kind, record_line):
    job, killed = Job.at(tmp_path / "job"), 0
    for number in calls(3):
        kills = {
            "call": lambda job, at=number: Fault(job.root, "KILL", at),
            "frame": lambda _, at=number: dies_before_frame(at),
        }
        child = multiprocessing.get_context("fork").Process(
            target=save_until, args=(str(tmp_path), form, kills[kind])
        )
        child.start()
        child.join(120)
        assert child.exitcode in (0, -signal.SIGKILL)
        there = checker.sealed(job.root)
        for step in there[-3:]:
            assert_same(str(tmp_path), step, str(tmp_path))
        assert checker.problems(job.root) == []
        if child.exitcode == 0:
            break
        killed += 1
    assert [form_of(job, step) for step in there[-3:]] == ["whole", "shortcut", form]
    assert killed
    record_line(f"SIGKILL at {killed} {kind}s of a save as a {form}")
