"""Training states that ranks write side by side into one directory."""

import os
import threading
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.samples import configured, context_of
from support.tiny import TinyEngine

from syncd.errors import StorageError
from syncd.protocol.layout import parse_attempt_name
from syncd.protocol.writer import StepWriter
from syncd.transports.ranks import Ranks
from trainer import checkpoints

pytestmark = pytest.mark.group("engines")

_LONG = 60.0


class Threads:
    """A rank that is a thread, one of two."""

    world_size = 2

    def __init__(self, rank, values, barrier):
        self.rank, self._values, self._barrier = rank, values, barrier

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def broadcast(self, value):
        return self.gather(value)[0]


def test_a_checkpoint_is_completed_once_all_ranks_have_written_their_parts(tmp_path, monkeypatch):
    """One rank's storage is slow: the other one does not wait for it, and the first completes nothing before."""
    (tmp_path / "job").mkdir()
    config, said = configured("none", tmp_path / "job"), []

    class Quick(TinyEngine):
        def train(self, batch, step):
            return {}

    def slow(job, directory, rank, note=checkpoints.note_written):
        time.sleep(0.2 if rank else 0)
        said.append(f"written {rank}")
        note(job, directory, rank)

    def completed(*arguments, complete=checkpoints.complete, **more):
        said.append("completed")
        complete(*arguments, **more)

    monkeypatch.setattr(checkpoints, "note_written", slow)
    monkeypatch.setattr(checkpoints, "complete", completed)
    values, barrier = [None, None], threading.Barrier(2, timeout=_LONG)
    engines = [Quick(context_of(config, Threads(rank, values, barrier))) for rank in range(2)]

    def save(engine):
        engine.prepare()
        engine.train_step(None)
        engine.save_checkpoint({}, block_until_saved=True)
        engine.shutdown()

    threads = [threading.Thread(target=save, args=[engine]) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG)
    assert [engine.saved_step for engine in engines] == [1, 1]
    assert said == ["written 0", "written 1", "completed"]
    names = os.listdir(tmp_path / "job" / "global_step_1" / "training")
    assert sorted(names) == ["tiny_0_of_2.pt", "tiny_1_of_2.pt", "trainer.json"]


def test_a_save_that_fails_in_the_background_removes_its_attempt(tmp_path, monkeypatch):
    """A disk that is full needs the room back, and only the next save notices that this one failed."""
    (tmp_path / "job").mkdir()

    class Quick(TinyEngine):
        def train(self, batch, step):
            return {}

    def full(self, **_):
        raise StorageError("No space left on device")

    engine = Quick(context_of(configured("none", tmp_path / "job"), Ranks()))
    engine.prepare()
    engine.train_step(None)
    monkeypatch.setattr(StepWriter, "seal", full)
    engine.save_state_dict()
    engine.train_step(None)
    with pytest.raises(StorageError, match="No space left"):
        engine.wait_for_save()
    names = os.listdir(tmp_path / "job")
    assert not [name for name in names if parse_attempt_name(name) is not None]
    monkeypatch.undo()
    engine.shutdown()
