"""Experiences on their way back: each batch once and in order, whatever is killed and whenever."""

import contextlib
import errno
import os
from dataclasses import replace

import pytest
from support.experiences import make
from support.mirrors import KilledError, MemoryObjects, kill_at, no_meter

from syncd.experience import batch_paths
from syncd.experience.table import MAX_BYTES, decode_batch
from syncd.experience.writer import ExperienceWriter
from syncd.parts.mirror.batches import BatchMover, JobBatches, JobIntake, StoreBatches, site_name
from syncd.protocol.disk import is_directory
from syncd.protocol.documents import write_document
from syncd.protocol.layout import Job, is_identity
from syncd.protocol.local_disk import LocalDisk, SystemClock
from trainer.experience.store import ExperienceReader

SITE = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@pytest.fixture
def jobs(shm):
    for name in ("near", "far"):
        os.mkdir(f"{shm}/{name}")
    near, far = Job.at(f"{shm}/near"), Job.at(f"{shm}/far")
    write_document(far.disk, far.owner, {"identity": SITE, "place": None})
    return near, far


def write(far, explorer, *tags):
    with ExperienceWriter(far, explorer) as writer:
        for tag in tags:
            writer.write([make(tag=tag)])


def tasks_read(near):
    """Return the tasks in the order in which a trainer reads them, by explorer."""
    read: dict[str, list[str]] = {}
    for batch in ExperienceReader(near).poll():
        read.setdefault(batch.file.explorer, []).extend(
            one.task.removeprefix("task-") for one in batch.experiences
        )
    return read


def mover(source, target):
    return BatchMover(source, target, no_meter(), lambda *_, **__: None)


def test_batches_come_home_over_a_store_in_order_and_leave_nothing_behind(jobs):
    near, far = jobs
    objects = MemoryObjects()
    write(far, "e0", "a", "b", "c")
    write(far, "e1", "d")
    assert mover(JobBatches(far, SystemClock()), StoreBatches(objects)).turn()
    assert [name for what, name in objects.calls if what == "create"] == [
        f"experiences/0f1e2d3c.{name}.parquet" for name in ("e0/1", "e0/2", "e0/3", "e1/1")
    ]
    assert mover(StoreBatches(objects), JobIntake(near)).turn()
    assert tasks_read(near) == {"0f1e2d3c.e0": ["a", "b", "c"], "0f1e2d3c.e1": ["d"]}
    assert objects.objects == {}
    assert batch_paths.numbers(far, batch_paths.batches(far, "e0")) == set()
    write(far, "e0", "e")  # its next writer uses no number again
    mover(JobBatches(far, SystemClock()), StoreBatches(objects)).turn()
    mover(StoreBatches(objects), JobIntake(near)).turn()
    assert tasks_read(near)["0f1e2d3c.e0"] == ["a", "b", "c", "e"]


def test_directly_from_job_to_job(jobs):
    near, far = jobs
    write(far, "e0", "a", "b")
    assert mover(JobBatches(far, SystemClock()), JobIntake(near)).turn()
    assert tasks_read(near) == {"0f1e2d3c.e0": ["a", "b"]}
    assert not mover(JobBatches(far, SystemClock()), JobIntake(near)).turn()


@pytest.mark.parametrize("when", ["after the write", "after the removal"])
def test_a_kill_between_any_two_calls_never_doubles_or_loses_a_batch(jobs, when):
    near, far = jobs
    objects = MemoryObjects()
    for count in range(1, 13):
        write(far, "e0", f"t{count}", f"u{count}")
        client = objects.sharing(kill_at(count))
        source, intake = JobBatches(far, SystemClock()), JobIntake(near)
        release, take = source.release, intake.take

        def killed_release(explorer, seq, release=release):
            if when == "after the removal":
                release(explorer, seq)
            raise KilledError

        def killed_take(explorer, seq, data, take=take):
            take(explorer, seq, data)
            raise KilledError

        if count % 3 == 1:
            source.release = killed_release
        if count % 3 == 2:
            intake.take = killed_take
        for one in (mover(source, StoreBatches(client)), mover(StoreBatches(client), intake)):
            with contextlib.suppress(KilledError):
                one.turn()
        mover(JobBatches(far, SystemClock()), StoreBatches(objects)).turn()
        mover(StoreBatches(objects), JobIntake(near)).turn()
    wanted = [f"{letter}{count}" for count in range(1, 13) for letter in "tu"]
    assert tasks_read(near) == {"0f1e2d3c.e0": wanted}
    assert objects.objects == {}


def test_what_the_trainer_has_consumed_is_not_written_again(jobs):
    near, far = jobs
    objects = MemoryObjects()
    write(far, "e0", "a")
    mover(JobBatches(far, SystemClock()), StoreBatches(objects)).turn()
    data = dict(objects.objects)
    mover(StoreBatches(objects), JobIntake(near)).turn()
    reader = ExperienceReader(near)
    list(reader.poll())
    reader.commit(dict(reader.cursor.through), frozenset())
    objects.objects.update(data)  # as after a kill between the write and the removal
    mover(StoreBatches(objects), JobIntake(near)).turn()
    assert tasks_read(near) == {}
    assert objects.objects == {}


def test_the_bytes_are_those_of_the_explorer(jobs):
    near, far = jobs
    write(far, "e0", "a")
    path = batch_paths.batch(far, "e0", 1)
    data = far.disk.read(path)
    mover(JobBatches(far, SystemClock()), JobIntake(near)).turn()
    there = batch_paths.batch(near, "0f1e2d3c.e0", 1)
    assert near.disk.read(there) == data
    assert decode_batch(data, path)


def test_what_is_above_the_limit_of_batches_is_set_aside_and_those_behind_it_go_on(jobs):
    near, far = jobs
    write(far, "e0", "a", "b", "c")
    os.truncate(batch_paths.batch(far, "e0", 2), MAX_BYTES + 1)
    told = []
    source = JobBatches(far, SystemClock())
    BatchMover(
        source, JobIntake(near), no_meter(), lambda *what, **fields: told.append((what, fields))
    ).turn()
    assert sorted(batch_paths.numbers(near, batch_paths.batches(near, "0f1e2d3c.e0"))) == [1, 3]
    assert batch_paths.numbers(far, batch_paths.rejected(far, "e0")) == {2}
    assert not any(source.waiting().values())
    (_, level), fields = next(one for one in told if one[0][0] == "mirror_batch_rejected")
    assert level == "warning"
    assert "2.parquet of explorer e0" in fields["detail"]
    assert fields["hint"] == f"ls {far.root}/experiences/.rejected/e0"


class UnreadableDisk(LocalDisk):
    """A disk that refuses to read the batches of one explorer."""

    def read(self, path, *limit):
        if "/e0/" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return super().read(path, *limit)


def test_batches_that_cannot_be_read_hold_up_those_of_their_explorer_alone(jobs):
    near, far = jobs
    for explorer in ("e0", "e1"):
        write(far, explorer, "a", "b")
    refused = JobBatches(replace(far, disk=UnreadableDisk()), SystemClock())
    with pytest.raises(PermissionError):
        mover(refused, JobIntake(near)).turn()
    assert tasks_read(near) == {"0f1e2d3c.e1": ["a", "b"]}
    assert mover(JobBatches(far, SystemClock()), JobIntake(near)).turn()
    assert tasks_read(near)["0f1e2d3c.e0"] == ["a", "b"]


def test_without_an_identity_of_the_far_job_nothing_moves(jobs):
    near, far = jobs
    write(far, "e0", "a")
    far.disk.unlink(far.owner)
    assert not mover(JobBatches(far, SystemClock()), JobIntake(near)).turn()
    assert not is_directory(near.disk, batch_paths.root(near))


def test_names_of_sites_are_names_of_the_protocol_and_stay_apart():
    long, other = "a" * 100, "a" * 99 + "b"
    assert is_identity(site_name("0f1e2d3c", long))
    assert site_name("0f1e2d3c", long) != site_name("0f1e2d3c", other)
    assert site_name("0f1e2d3c", "e0") == "0f1e2d3c.e0"
