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
from trainer.engines import files

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


def test_a_rank_waits_to_sync_files_until_all_ranks_have_written_theirs(tmp_path, monkeypatch):
    """Some engines write more than belongs there and take it away again: verl's, on its first rank."""
    (tmp_path / "job").mkdir()
    config, told = configured("none", tmp_path / "job"), []

    class Slow(TinyEngine):
        def train(self, batch, step):
            return {}

        def save_training_state(self, directory):
            super().save_training_state(directory)
            if self.context.ranks.rank == 0:
                time.sleep(0.2)
            told.append("written")

    monkeypatch.setattr(files, "sync_tree", lambda *_: told.append("synced"))
    values, barrier = [None, None], threading.Barrier(2, timeout=_LONG)
    engines = [Slow(context_of(config, Threads(rank, values, barrier))) for rank in range(2)]

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
    assert told == ["written", "written", "synced", "synced"]


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
