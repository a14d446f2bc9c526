"""Reading batches: each once and in order, whatever else lies in the directories, and letting go of them."""

import errno
import json
import os

import pytest
from support.experiences import fifo, make, names, whole_group, write
from support.jobs import ManualClock

from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from trainer.experience.store import ExperienceReader


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


@pytest.fixture
def clock():
    return ManualClock()


def taken(reader):
    return [(loaded.file.explorer, loaded.file.seq) for loaded in reader.poll()]


def rejected(job, explorer="e0"):
    directory = batch_paths.rejected(job, explorer)
    found = {}
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if name.endswith(".reason.json"):
            with open(f"{directory}/{name}", encoding="ascii") as file:
                found[name.removesuffix(".reason.json")] = json.load(file)["reason"]
    return found


def content(path):
    with open(path, "rb") as file:
        return file.read()


def put(job, name, data=b"torn", explorer="e0"):
    job.disk.make_directory(batch_paths.batches(job, explorer))
    with open(f"{batch_paths.batches(job, explorer)}/{name}", "wb") as file:
        file.write(data)


def test_an_empty_or_missing_job_has_no_batches(job, clock, tmp_path):
    assert taken(ExperienceReader(job, clock)) == []
    assert taken(ExperienceReader(Job.at(tmp_path / "missing"), clock)) == []


def test_each_batch_is_read_once_and_explorers_take_turns(job, clock):
    write(job, "e0", [make()], [make()], [make()])
    write(job, "e1", [make()])
    reader = ExperienceReader(job, clock)
    assert taken(reader) == [("e0", 1), ("e1", 1), ("e0", 2), ("e0", 3)]
    assert taken(reader) == []
    write(job, "e0", [make()])
    write(job, "e1", [make()])
    assert taken(reader) == [("e1", 2), ("e0", 4)]


def test_a_new_poll_continues_with_the_next_explorer(job, clock):
    for name in ("e0", "e1", "e2"):
        write(job, name, [make()], [make()])
    reader = ExperienceReader(job, clock)
    seen = [next(reader.poll()).file.explorer for _ in range(6)]
    assert seen == ["e0", "e1", "e2"] * 2


def test_invalid_batches_are_rejected_with_a_reason(job, clock):
    write(job, "e0", [make()])
    data = content(batch_paths.batch(job, "e0", 1))
    put(job, "2.parquet", data[: len(data) // 2])
    put(job, "3.parquet", b"")
    put(job, "notes.parquet")
    put(job, "\udcff\n.parquet")
    put(job, "readme.txt")
    os.mkfifo(f"{batch_paths.batches(job, 'e0')}/4.parquet")
    os.symlink(batch_paths.batch(job, "e0", 1), batch_paths.batch(job, "e0", 5))
    os.mkdir(batch_paths.batch(job, "e0", 6))
    put(job, "7.parquet", data)
    reader = ExperienceReader(job, clock)
    assert taken(reader) == [("e0", 1), ("e0", 7)]
    reasons = rejected(job)
    assert {"2.parquet", "3.parquet", "4.parquet", "5.parquet", "6.parquet", "notes.parquet"} < set(reasons)
    assert len(reasons) == 7
    assert "regular" in reasons["4.parquet"]
    assert "regular" in reasons["5.parquet"]
    assert reader.counts["rejected"] == 7
    assert sorted(os.listdir(batch_paths.batches(job, "e0"))) == ["1.parquet", "7.parquet", "readme.txt"]
    assert taken(reader) == []


def test_a_symbolic_link_named_like_an_explorer_is_not_followed(job, clock, tmp_path):
    other = Job.at(tmp_path / "other")
    os.mkdir(other.root)
    write(other, "e0", [make()])
    os.mkdir(batch_paths.root(job))
    os.symlink(batch_paths.batches(other, "e0"), batch_paths.batches(job, "e0"))
    assert taken(ExperienceReader(job, clock)) == []


def test_a_bad_batch_that_cannot_be_moved_is_skipped_and_counted_once(job, clock, monkeypatch):
    put(job, "1.parquet")
    write(job, "e0", [make()])
    reader = ExperienceReader(job, clock)

    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalDisk, "rename", refuse)
    assert taken(reader) == [("e0", 2)]
    assert taken(reader) == []
    assert reader.counts["rejected"] == 1


def test_the_reader_waits_for_a_missing_batch_number(job, clock):
    """A listing that is made while batches arrive may show the later of two alone."""
    write(job, "e0", [make()], [make()], [make()])
    hidden = f"{job.root}/hidden"
    os.rename(batch_paths.batch(job, "e0", 2), hidden)
    reader = ExperienceReader(job, clock)
    assert taken(reader) == [("e0", 1)]
    clock.at += 59
    assert taken(reader) == []
    os.rename(hidden, batch_paths.batch(job, "e0", 2))
    assert taken(reader) == [("e0", 2), ("e0", 3)]


def test_a_missing_batch_number_is_skipped_after_a_time_out(job, clock):
    write(job, "e0", [make()])
    data = content(batch_paths.batch(job, "e0", 1))
    put(job, "900000000000000.parquet", data)
    reader = ExperienceReader(job, clock)
    assert taken(reader) == [("e0", 1)]
    clock.at += 61
    assert taken(reader) == [("e0", 900000000000000)]
    assert reader.counts["missing"] == 1


@pytest.mark.parametrize("place", [".consumed", ".rejected"])
def test_what_cannot_be_asked_about_a_missing_batch_number_is_asked_again(job, clock, monkeypatch, place):
    write(job, "e0", [make()], [make()])
    os.rename(batch_paths.batch(job, "e0", 1), f"{job.root}/hidden")
    reader = ExperienceReader(job, clock)
    with monkeypatch.context() as patch:
        for name in ("read", "list"):
            real = getattr(LocalDisk, name)

            def failing(disk, path, *limit, real=real):
                if place in path:
                    raise OSError(errno.EIO, "Input/output error", path)
                return real(disk, path, *limit)

            patch.setattr(LocalDisk, name, failing)
        assert taken(reader) == []
        assert reader.counts["retried"] == 1
    os.rename(f"{job.root}/hidden", batch_paths.batch(job, "e0", 1))
    assert taken(reader) == [("e0", 1), ("e0", 2)]


class Flaky(LocalDisk):
    """A disk on which reads of batches fail for a while."""

    error = None

    def read(self, path, limit=1 << 30):
        if self.error and path.endswith(".parquet"):
            raise OSError(self.error, os.strerror(self.error), path)
        return super().read(path, limit)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EACCES])
def test_an_unreadable_batch_is_retried_and_finally_rejected(job, clock, number):
    write(job, "e0", [make()], [make()])
    disk = Flaky()
    reader = ExperienceReader(Job.at(job.root, disk=disk), clock)
    disk.error = number
    assert taken(reader) == []
    disk.error = None
    assert taken(reader) == [("e0", 1), ("e0", 2)]
    write(job, "e0", [make()])
    disk.error = number
    assert taken(reader) == []
    clock.at += 61
    assert taken(reader) == []
    assert "cannot be read" in rejected(job)["3.parquet"]


def test_a_failed_listing_is_retried_at_the_next_poll(job, clock, monkeypatch):
    write(job, "e0", [make()])
    reader = ExperienceReader(job, clock)
    real = LocalDisk.list

    def fail(self, path):
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(LocalDisk, "list", fail)
    assert taken(reader) == []
    monkeypatch.setattr(LocalDisk, "list", real)
    assert taken(reader) == [("e0", 1)]


def resumed(job, clock, state, **more):
    strategy = fifo(job, clock, **more)
    strategy.load_state_dict(json.loads(json.dumps(state)))
    return strategy


def test_batches_are_kept_until_a_saved_state_covers_them(job, clock):
    write(job, "e0", [*whole_group("a"), make("b", 0)], [*whole_group("c"), make("b", 1)], whole_group("d"))
    strategy = fifo(job, clock, groups=1)
    before = strategy.state_dict()
    assert names(strategy.sample(1, generation=1))[0][1] == "a"
    assert strategy.commit(before) == 0
    state = strategy.state_dict()
    assert strategy.commit(state) == 0
    assert names(strategy.sample(2, generation=1))[0][1] == "b"
    assert strategy.commit(strategy.state_dict()) == 1
    assert batch_paths.numbers(job, batch_paths.batches(job, "e0")) == {2, 3}
    assert names(resumed(job, clock, strategy.state_dict(), groups=1).sample(3, generation=1))[0][1] == "c"


def test_archived_batches_make_a_resume_from_an_older_state_exact(job, clock):
    write(job, "e0", *[whole_group(name) for name in "abc"])
    reader = ExperienceReader(job, clock, consumed="archive")
    strategy = fifo(job, clock, groups=1, reader=reader, max_waiting=2)
    strategy.sample(1, generation=1)
    old = strategy.state_dict()
    write(job, "e1", whole_group("d"))
    later = [names(strategy.sample(step, generation=1)) for step in (2, 3, 4)]
    assert strategy.commit(strategy.state_dict()) == 4
    assert batch_paths.numbers(job, batch_paths.batches(job, "e0")) == set()
    assert None not in later
    again = resumed(job, clock, old, groups=1, max_waiting=2)
    assert [names(again.sample(step, generation=1)) for step in (2, 3, 4)] == later


def test_a_resume_from_an_older_state_skips_removed_batches(job, clock):
    write(job, "e0", *[whole_group(name) for name in "abcd"])
    strategy = fifo(job, clock, groups=1)
    old = strategy.state_dict()
    for step in range(4):
        strategy.sample(step, generation=1)
    assert strategy.commit(strategy.state_dict()) == 4
    write(job, "e0", whole_group("e"))
    again = resumed(job, clock, old, groups=1)
    assert names(again.sample(1, generation=1))[0][1] == "e"


def test_a_restored_group_whose_batch_is_lost_is_dropped(job, clock):
    write(job, "e0", whole_group("a"), whole_group("b"))
    strategy = fifo(job, clock, groups=2, size=2)
    strategy.pop_groups(3, (1, 1))
    state = strategy.state_dict()
    os.unlink(batch_paths.batch(job, "e0", 1))
    again = resumed(job, clock, state, groups=1)
    assert names(again.sample(1, generation=1))[0][1] == "b"
    assert again.reader.counts["lost"] == 1


class Recovering(ManualClock):
    """A clock of a host on which a disk can be read again once somebody has slept for so long."""

    def __init__(self, disk, seconds):
        super().__init__()
        self.disk, self.end = disk, self.at + seconds

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.at >= self.end:
            self.disk.error = None


@pytest.mark.parametrize(("seconds", "lost"), [(5, 0), (600, 2)])
def test_a_resume_waits_for_batches_that_cannot_be_read_for_a_moment(job, clock, seconds, lost):
    write(job, "e0", whole_group("a"))
    write(job, "e1", whole_group("b"))
    strategy = fifo(job, clock, groups=3, size=2)
    strategy.sample(1, generation=1)
    state = strategy.state_dict()
    disk = Flaky()
    disk.error, here = errno.EIO, Recovering(disk, seconds)
    begun = here.at
    again = resumed(Job.at(job.root, disk=disk), here, state, groups=2)
    assert again.reader.counts["lost"] == lost
    assert here.at - begun <= 61, "once for all batches"
    assert (again.sample(1, generation=1) is None) == bool(lost)


def test_a_failed_commit_is_retried_and_does_not_raise(job, clock, monkeypatch):
    write(job, "e0", whole_group("a"))
    strategy = fifo(job, clock, groups=1)
    strategy.sample(1, generation=1)

    def fail(self, path):
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(LocalDisk, "unlink", fail)
    assert strategy.commit(strategy.state_dict()) == 0
    monkeypatch.undo()
    assert strategy.commit(strategy.state_dict()) == 1


def test_one_explorer_whose_batches_cannot_be_removed_keeps_no_others(job, clock, monkeypatch):
    for explorer in ("e0", "e1", "e2"):
        write(job, explorer, whole_group("a"))
    strategy = fifo(job, clock, groups=3)
    strategy.sample(1, generation=1)
    unlink = LocalDisk.unlink

    def refuse(self, path):
        if "/e0/" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(self, path)

    monkeypatch.setattr(LocalDisk, "unlink", refuse)
    assert strategy.commit(strategy.state_dict()) == 2
    assert [batch_paths.numbers(job, batch_paths.batches(job, name)) for name in ("e0", "e1", "e2")] == [
        {1}, set(), set()
    ]  # fmt: skip


def test_an_archived_batch_keeps_its_bytes(job, clock):
    (path,) = write(job, "e0", whole_group("a"))
    data = content(path)
    strategy = fifo(job, clock, groups=1, reader=ExperienceReader(job, clock, consumed="archive"))
    strategy.sample(1, generation=1)
    strategy.commit(strategy.state_dict())
    assert content(f"{batch_paths.archive(job, 'e0')}/1.parquet") == data
    assert decode_batch(data, "x") == tuple(whole_group("a"))
