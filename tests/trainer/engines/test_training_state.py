"""Training states that ranks write side by side into one directory."""

import errno
import os
import threading
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

import structlog
import torch
from support.jobs import write_step
from support.samples import configured, context_of
from support.tiny import TinyEngine

from syncd.errors import StorageError, TimedOutError
from syncd.protocol.layout import Job, parse_attempt_name
from syncd.protocol.writer import StepWriter
from syncd.transports.files import step_saver
from syncd.transports.ranks import Ranks
from trainer import checkpoints
from trainer.engines import state_copy

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


def on_two_ranks(work):
    """Do something as each of two ranks, in a thread each."""
    threads = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG)


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

    on_two_ranks(lambda rank: save(engines[rank]))
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


class Counting(TinyEngine):
    """Each step adds 1 to every weight."""

    def train(self, batch, step):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)
        return {}


def counting(tmp_path, **tables):
    (tmp_path / "job").mkdir()
    engine = Counting(context_of(configured("none", tmp_path / "job", **tables), Ranks()))
    engine.prepare()
    return engine


def saved_weight(tmp_path, step):
    """Return a weight of the training state of a step."""
    file = tmp_path / "job" / f"global_step_{step}" / "training" / "tiny_0_of_1.pt"
    return torch.load(file)["model"]["layer.bias"][0].item()


def test_training_continues_while_the_training_state_is_written(tmp_path, monkeypatch):
    engine, may_write = counting(tmp_path), threading.Event()
    begin = checkpoints.begin_training
    monkeypatch.setattr(
        checkpoints, "begin_training", lambda *arguments: (may_write.wait(_LONG), begin(*arguments))
    )
    before = engine.model.layer.bias[0].item()
    engine.train_step(None)
    engine.save_checkpoint({})
    for _ in range(3):
        engine.train_step(None)
    assert (engine.saved_step, engine.save_failed) == (0, False)
    may_write.set()
    engine.wait_for_save()
    assert engine.saved_step == 1
    assert saved_weight(tmp_path, 1) == pytest.approx(before + 1)
    assert engine.model.layer.bias[0].item() == pytest.approx(before + 4)
    engine.shutdown()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_storage_in_the_thread_surfaces_at_the_wait_and_the_next_save_works(
    tmp_path, monkeypatch, number
):
    def broken(*_):
        raise OSError(number, os.strerror(number))

    engine = counting(tmp_path)
    engine.train_step(None)
    monkeypatch.setattr(state_copy, "open", broken, raising=False)
    engine.save_checkpoint({})
    while not engine.save_failed:
        time.sleep(0.01)
    engine.train_step(None)
    with pytest.raises(StorageError, match=os.strerror(number)):
        engine.wait_for_save()
    step = tmp_path / "job" / "global_step_1"
    assert not [path for path in (*step.iterdir(), *step.parent.iterdir()) if "training" in path.name]
    assert not (step / ".full_checkpoint").exists()
    assert (step / "manifest.json").exists(), "the weights are a step nevertheless"
    monkeypatch.undo()
    engine.save_checkpoint({}, block_until_saved=True)
    assert (engine.saved_step, engine.save_failed) == (2, False)
    engine.shutdown()


def test_without_memory_for_a_copy_the_save_waits_until_it_is_written(tmp_path):
    engine = counting(tmp_path, trainer={"host_memory_mib": 1}, engine={"options": {"vocab": 40000}})
    engine.train_step(None)
    with structlog.testing.capture_logs() as logs:
        engine.save_checkpoint({})
    assert engine.saved_step == 1
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["save_blocks"]
    assert "no room for the copy of the training state" in logs[0]["reason"]
    engine.shutdown()


def test_the_figures_of_a_save_have_its_blocked_seconds_and_the_memory_that_is_taken(tmp_path):
    engine = counting(tmp_path)
    engine.train_step(None)
    engine.save_checkpoint({})
    assert engine.sync_metrics["timing_s/save_blocked"] > 0
    assert 0 < engine.sync_metrics["save/host_memory_mib"] < 1
    engine.shutdown()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_is_raised_on_all_and_no_rank_waits_for_its_part(tmp_path, monkeypatch, failing):
    """The timeout is longer than the test's: what ends the wait is that ranks tell each other."""
    (tmp_path / "job").mkdir()
    config, raised = configured("none", tmp_path / "job", sync={"save_timeout": 10 * _LONG}), [None, None]

    def full(job, directory, rank, note=checkpoints.note_written):
        if rank == failing:
            raise StorageError("No space left on device")
        note(job, directory, rank)

    monkeypatch.setattr(checkpoints, "note_written", full)
    values, barrier = [None, None], threading.Barrier(2, timeout=_LONG)

    def save(rank):
        engine = Counting(context_of(config, Threads(rank, values, barrier)))
        engine.prepare()
        engine.train_step(None)
        try:
            engine.save_checkpoint({}, block_until_saved=True)
        except StorageError as error:
            raised[rank] = error.message
        engine.shutdown()

    on_two_ranks(save)
    assert raised == ["No space left on device"] * 2
    places = (tmp_path / "job", tmp_path / "job" / "global_step_1")
    assert not [name for place in places for name in os.listdir(place) if "training" in name]


def test_what_a_rank_writes_late_is_not_in_the_way_of_its_step(tmp_path):
    """Its step is removed between two of its files, and written again."""
    job = Job.at(tmp_path)
    write_step(job, 4)
    directory = checkpoints.begin_training(job, "a")
    state_copy.write_files({"model.pt": b"", "critic/model.pt": b""}, directory)
    os.rename(job.step(4), job.step(5))
    state_copy.write_files({"critic/optim.pt": b""}, directory)
    write_step(job, 4)
    assert not [name for name in os.listdir(job.step(4)) if "training" in name]


def test_a_rank_whose_save_was_removed_writes_nothing_more(tmp_path):
    job = Job.at(tmp_path)
    directory = checkpoints.begin_training(job, "a")
    checkpoints.begin_training(job, "b")
    for name in ("model.pt", "critic/model.pt"):
        with pytest.raises(StorageError, match="No such file"):
            state_copy.write_files({name: b""}, directory)
    assert not os.path.exists(directory)


def test_a_rank_that_seals_a_step_after_the_others_gave_up_leaves_a_step_that_is_saved(tmp_path, monkeypatch):
    """The first rank ends its wait; the second seals the step, and learns of the error then."""
    (tmp_path / "job").mkdir()
    config, may_write, raised = configured("none", tmp_path / "job"), threading.Event(), [None, None]
    begin = StepWriter.receipt

    def slow(writer, number, *arguments, **more):
        if number == 2:
            may_write.wait(_LONG)
        return begin(writer, number, *arguments, **more)

    def given_up(writer, rank, *_):
        if rank == 0:
            may_write.set()
            raise TimedOutError("step 1 was not completed by all ranks")

    monkeypatch.setattr(StepWriter, "receipt", slow)
    monkeypatch.setattr(step_saver, "wait_until_whole", given_up)
    values, barrier = [None, None], threading.Barrier(2, timeout=_LONG)

    def save(rank):
        engine = Counting(context_of(config, Threads(rank, values, barrier)))
        engine.prepare()
        engine.train_step(None)
        engine.save_state_dict()
        try:
            engine.wait_for_save()
        except TimedOutError as error:
            raised[rank] = error.message
        engine.save_checkpoint({}, block_until_saved=True)
        assert engine.saved_step == 1
        engine.shutdown()

    on_two_ranks(save)
    assert raised == ["step 1 was not completed by all ranks"] * 2
    assert checkpoints.full_checkpoints(Job.at(tmp_path / "job")) == [1]


def test_weights_beyond_the_budget_are_streamed(tmp_path):
    with structlog.testing.capture_logs() as logs:
        engine = counting(tmp_path, trainer={"host_memory_mib": 1}, engine={"options": {"vocab": 200_000}})
    assert [log["event"] for log in logs] == ["save_blocks"]
    assert "no room for the buffer for weights: 4 MiB where 1 of 1 are free" in logs[0]["reason"]
    engine.train_step(None)
    engine.save_state_dict()
    assert (tmp_path / "job" / "global_step_1" / "manifest.json").exists(), (
        "it is whole when the call returns"
    )
    engine.save_checkpoint({})
    assert engine.saved_step == 1
    engine.shutdown()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm that can be written")
def test_copies_in_memory_beyond_the_budget_are_skipped(tmp_path):
    with structlog.testing.capture_logs() as logs:
        engine = counting(tmp_path, trainer={"host_memory_mib": 1}, sync={"method": "memory"})
        engine.train_step(None)
        engine.upload_state_dict()
        engine.wait_for_save()
        engine.shutdown()
    skipped = [log["reason"] for log in logs if log["event"] == "memory_copy_skipped"]
    assert skipped == ["no room for the copies in memory: 3 MiB where 0 of 1 are free"]
