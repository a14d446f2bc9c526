"""Training states that ranks write side by side into one directory."""

import threading
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from samples import configured, context_of
from tiny import TinyEngine

from trainer.engines import files

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


def test_no_rank_walks_over_the_files_of_another_that_is_not_done(tmp_path, monkeypatch):
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
