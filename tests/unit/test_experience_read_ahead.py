"""Reading batches ahead in a thread: the same batches in the same order, read once each, within a bound."""

import os
import threading

import pytest
from support.experiences import fifo, make, whole_group, write
from support.jobs import ManualClock

from syncd.experience import batch_paths
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from trainer.experience.store import ExperienceReader


class CountingDisk(LocalDisk):
    """Notes which batches are read, and by which thread."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def read(self, path, limit):
        if path.endswith(batch_paths.SUFFIX):
            self.reads.append((os.path.basename(path), threading.current_thread().name))
        return super().read(path, limit)


@pytest.fixture
def disk():
    return CountingDisk()


@pytest.fixture
def reader(tmp_path, disk):
    return ExperienceReader(Job.at(tmp_path, disk=disk), ManualClock())


def ahead(reader, rows=100):
    """Read ahead until the thread has nothing more to do."""
    with reader.reading_ahead(rows):
        reader._ahead._thread.join(60)
    assert not reader._ahead._thread.is_alive()


def taken(reader):
    return [(loaded.file, loaded.experiences) for loaded in reader.poll()]


def test_batches_that_were_read_ahead_are_not_read_again(reader, disk):
    write(reader.job, "e0", [make()], [make(), make()])
    write(reader.job, "e1", [make()])
    ahead(reader)
    assert [name for name, _ in disk.reads] == ["1.parquet", "1.parquet", "2.parquet"]
    assert {thread for _, thread in disk.reads} == {"read-ahead"}
    found = taken(reader)
    assert len(disk.reads) == 3
    assert found == taken(ExperienceReader(reader.job, ManualClock()))


def test_it_stops_at_the_bound_and_continues_behind_what_was_taken(reader, disk):
    write(reader.job, "e0", *([make(), make()] for _ in range(5)))
    ahead(reader, rows=3)
    assert [name for name, _ in disk.reads] == ["1.parquet", "2.parquet"]
    ahead(reader, rows=3)
    assert len(disk.reads) == 2
    next(reader.poll())
    ahead(reader, rows=3)
    assert [name for name, _ in disk.reads[2:]] == ["3.parquet"]


def test_what_cannot_be_read_ahead_is_met_in_its_turn(reader, disk):
    write(reader.job, "e0", [make()], [make()], [make()])
    with open(batch_paths.batch(reader.job, "e0", 2), "wb") as file:
        file.write(b"torn")
    os.unlink(batch_paths.batch(reader.job, "e0", 3))
    write(reader.job, "e1", [make()])
    ahead(reader)
    assert [file for file, _ in taken(reader)] == [("e0", 1), ("e1", 1)]
    assert reader.counts["rejected"] == 1


def test_a_batch_that_was_taken_meanwhile_is_forgotten(reader):
    write(reader.job, "e0", [make()], [make()])
    ahead(reader)
    reader._ahead._batches |= dict(taken(reader))  # the thread was late
    write(reader.job, "e0", [make()])
    ahead(reader, rows=1)
    assert [file.seq for file in reader._ahead._batches] == [3]


def test_another_cursor_reads_its_own_batches(reader, disk):
    write(reader.job, "e0", [make()], [make()])
    start = reader.cursor
    ahead(reader)
    list(reader.poll())
    reader.restore(start)
    reader.restore(type(start)())
    assert [file.seq for file, _ in taken(reader)] == [1, 2]
    assert len(disk.reads) == 4


def test_a_strategy_draws_the_same_with_and_without_reading_ahead(tmp_path):
    job = Job.at(tmp_path)
    write(job, "e0", *(whole_group(f"g{number}") for number in range(6)))
    plain, quick = (fifo(job, ManualClock()) for _ in range(2))
    for step in range(6):
        with quick.preparing():
            quick.reader._ahead._thread.join(60)
        one, other = (strategy.sample(step, generation=1) for strategy in (plain, quick))
        assert one == other
        assert plain.state_dict() == quick.state_dict()
