"""Writing batches: whole or not at all, numbers never used twice, one writer of an identity."""

import errno
import os

import pytest
from support.experiences import make, whole_group, write

from syncd.errors import FencedError, StorageError, UsageError
from syncd.experience import batch_paths
from syncd.experience.table import decode_batch, encode_batch
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def test_batches_are_numbered_from_one_without_other_files_beside_them(job):
    paths = write(job, "e0", whole_group("a"), whole_group("b"))
    assert [os.path.relpath(path, job.root) for path in paths] == [
        "experiences/e0/1.parquet",
        "experiences/e0/2.parquet",
    ]
    assert sorted(os.listdir(batch_paths.batches(job, "e0"))) == ["1.parquet", "2.parquet"]
    with open(paths[1], "rb") as file:
        assert decode_batch(file.read(), "x") == tuple(whole_group("b"))


def test_batch_numbers_continue_after_a_restart(job):
    write(job, "e0", [make()], [make()], [make()])
    job.disk.make_directory(batch_paths.rejected(job, "e0"))
    os.rename(batch_paths.batch(job, "e0", 3), f"{batch_paths.rejected(job, 'e0')}/3.parquet")
    assert write(job, "e0", [make()])[0].endswith("/4.parquet")
    batch_paths.mark_consumed(job, "e0", 4)
    for seq in (1, 2, 4):
        os.unlink(batch_paths.batch(job, "e0", seq))
    os.unlink(f"{batch_paths.rejected(job, 'e0')}/3.parquet")
    assert write(job, "e0", [make()])[0].endswith("/5.parquet")


def test_the_rest_of_a_batch_is_no_batch_of_its_own_also_after_a_restart(job):
    data = encode_batch([make()])
    with ExperienceWriter(job, "e0") as writer:
        for is_rest in (False, True, False, True, True):
            writer.write_encoded(data, is_rest=is_rest)
        assert (writer.upcoming, writer.written) == (6, 2)
    with ExperienceWriter(job, "e0") as writer:
        writer.write_encoded(data)
        assert (writer.upcoming, writer.written) == (7, 3)


def test_a_writer_refuses_an_invalid_identity_or_a_missing_job(job, tmp_path):
    with pytest.raises(UsageError):
        ExperienceWriter(job, "../e0")
    with pytest.raises(UsageError):
        ExperienceWriter(job, ".archive")
    with pytest.raises(StorageError):
        ExperienceWriter(Job.at(tmp_path / "missing"), "e0")
    assert not os.path.exists(tmp_path / "missing")


def test_an_earlier_writer_of_the_same_identity_is_fenced(job):
    first = ExperienceWriter(job, "e0")
    first.write([make()])
    second = ExperienceWriter(job, "e0")
    with pytest.raises(FencedError, match="later process"):
        first.write([make()])
    assert second.write([make()]).endswith("/2.parquet")


def test_a_fenced_writer_takes_no_batch_of_a_later_writer_for_its_own(job):
    first = ExperienceWriter(job, "e0")
    first.write([make()])
    second = ExperienceWriter(job, "e0")
    for _ in range(3):
        second.write([make()])
    for _ in range(2):
        with pytest.raises(FencedError, match="later process"):
            first.write([make()])
    assert first.upcoming == 2


def test_writers_of_two_identities_are_independent(job):
    first, second = ExperienceWriter(job, "e0"), ExperienceWriter(job, "e1")
    assert first.write([make()]).endswith("e0/1.parquet")
    assert second.write([make()]).endswith("e1/1.parquet")


class Failing(LocalDisk):
    """A disk on which one step of a write fails."""

    def __init__(self, method):
        self.method, self.armed = method, False

    def rename(self, source, target):
        if self.armed and self.method == "rename":
            raise OSError(errno.ENOSPC, "No space left on device", target)
        super().rename(source, target)

    def sync_directory(self, path):
        if self.armed and self.method == "sync":
            raise OSError(errno.EIO, "Input/output error", path)
        super().sync_directory(path)


def test_a_failed_write_leaves_no_file_and_its_number_is_reused(job):
    disk = Failing("rename")
    writer = ExperienceWriter(Job.at(job.root, disk=disk), "e0")
    disk.armed = True
    with pytest.raises(StorageError, match="No space"):
        writer.write([make()])
    assert os.listdir(batch_paths.batches(job, "e0")) == []
    disk.armed = False
    assert writer.write([make()]).endswith("/1.parquet")


def test_a_visible_batch_is_never_overwritten_after_a_failed_sync(job):
    disk = Failing("sync")
    writer = ExperienceWriter(Job.at(job.root, disk=disk), "e0")
    disk.armed = True
    with pytest.raises(StorageError, match="visible"):
        writer.write([make()])
    disk.armed = False
    assert writer.write([make()]).endswith("/2.parquet")


def test_batch_file_names_are_parsed_strictly():
    assert batch_paths.parse_batch("1.parquet") == 1
    for name in (
        "0.parquet",
        "01.parquet",
        "-1.parquet",
        "1.parquet.tmp",
        ".1.parquet",
        "x.parquet",
        "1" * 16 + ".parquet",
        "\u0661.parquet",
    ):
        assert batch_paths.parse_batch(name) is None


def test_a_damaged_consumed_mark_counts_as_zero(job):
    assert batch_paths.consumed_through(job, "e0") == 0
    batch_paths.mark_consumed(job, "e0", 7)
    assert batch_paths.consumed_through(job, "e0") == 7
    with open(f"{batch_paths.root(job)}/.consumed/e0.json", "w", encoding="ascii") as file:
        file.write("{")
    assert batch_paths.consumed_through(job, "e0") == 0
