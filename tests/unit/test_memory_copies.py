"""Copies in memory: which one is a version's, who may read it, and when it goes."""

import errno
import os
import shutil
from dataclasses import asdict, replace

import pytest
from support.jobs import write_step
from support.remembered import remember, shard_of

from syncd.protocol import memory_copies
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.memory_copies import (
    MEMORY_KEY,
    MemoryDirectory,
    clear_all,
    clear_directory,
    copies_in,
    discard,
    hold_copy,
    lock_directory,
    memory_directory_of,
)
from syncd.protocol.process import Process


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def manifest(job):
    write_step(job, 3, 2)
    return read_manifest(job.disk, job.step(3))


def test_the_memory_copy_of_a_save_is_found_by_its_manifest(job, root, manifest):
    place = remember(job, manifest, root)
    held = hold_copy(place, manifest)
    for record in (*manifest.shards, *manifest.files):
        with (
            open(f"{held.path}/{record.name}", "rb") as one,
            open(f"{job.step(3)}/{record.name}", "rb") as other,
        ):
            assert one.read() == other.read()
    held.close()


def lengthened(path):
    with open(path, "ab") as file:
        file.write(b"x")


SPOILT = {
    "a shard is longer": lambda place, manifest: lengthened(shard_of(place, manifest)),
    "a shard is missing": lambda place, manifest: os.unlink(shard_of(place, manifest)),
    "a shard is a link": lambda place, manifest: relinked(shard_of(place, manifest)),
    "a writer has left no receipt": lambda place, manifest: os.unlink(
        f"{place.copy(3, manifest.attempt)}/actor/.receipts/00002-of-00002.json"
    ),
    "others may use the place": lambda place, manifest: os.chmod(place.directory, 0o750),
    "the place is a link": lambda place, manifest: relinked(place.directory),
    "others can replace the place": lambda place, manifest: os.chmod(os.path.dirname(place.directory), 0o777),
}


def relinked(path):
    os.rename(path, f"{path}.real")
    os.symlink(f"{path}.real", path)


@pytest.mark.parametrize("what", SPOILT)
def test_a_memory_copy_that_is_incomplete_or_not_private_is_not_used(job, root, manifest, what):
    place = remember(job, manifest, root)
    SPOILT[what](place, manifest)
    assert hold_copy(place, manifest) is None


def test_a_memory_copy_of_another_save_is_not_used(job, root, manifest, tmp_path):
    """Of the same step, its files of the same names and sizes: as it is, and under the name of the wanted one."""
    (tmp_path / "other").mkdir()
    other_job = Job.at(tmp_path / "other")
    write_step(other_job, 3, 2, salt=9)
    other = read_manifest(other_job.disk, other_job.step(3))
    place = remember(job, manifest, root)
    assert [record.size for record in other.shards] == [record.size for record in manifest.shards]
    assert hold_copy(place, other) is None
    shutil.copytree(place.copy(3, manifest.attempt), place.copy(3, other.attempt))
    assert hold_copy(place, other) is None
    assert hold_copy(place, replace(manifest, attempt=f"../{manifest.attempt}")) is None
    assert hold_copy(place, replace(manifest, step=4)) is None


def test_a_memory_copy_in_use_is_removed_only_after_its_reader_closes(job, root, manifest):
    place = remember(job, manifest, root)
    owner = lock_directory(place.directory)
    held = hold_copy(place, manifest)
    assert lock_directory(place.directory) is None
    left = discard(place.directory)
    assert left >= manifest.size
    assert os.path.isdir(held.path)
    held.close()
    assert os.path.isdir(held.path), "only its owner removes, while there is one"
    assert discard(place.directory) == 0
    assert copies_in(place.directory) == []
    assert hold_copy(place, manifest) is None
    owner.close()


def test_discard_keeps_the_named_copies(job, root, manifest):
    place = remember(job, manifest, root)
    name = f"3-{manifest.attempt}"
    assert discard(place.directory, keep=[name]) >= manifest.size
    assert copies_in(place.directory) == [name]


def test_the_last_reader_removes_the_copies_of_an_ended_trainer(job, root, manifest):
    place = remember(job, manifest, root)
    first, second = hold_copy(place, manifest), hold_copy(place, manifest)
    clear_directory(place.directory)
    first.close()
    assert os.path.isdir(second.path)
    second.close()
    assert os.listdir(root) == []


def test_a_reader_that_closes_during_a_clear_leaves_no_copy(job, root, manifest, monkeypatch):
    """It finds the place owned, so whoever clears has to look once more."""
    place = remember(job, manifest, root)
    held = hold_copy(place, manifest)
    original = memory_copies.discard

    def released(directory, keep=()):
        found = original(directory, keep)
        held.close()
        return found

    monkeypatch.setattr(memory_copies, "discard", released)
    clear_directory(place.directory)
    assert os.listdir(root) == []


def test_a_start_clears_only_stale_directories_of_this_user(job, root, manifest, tmp_path):
    place = remember(job, manifest, root)
    (tmp_path / "other").mkdir()
    living = MemoryDirectory.here(str(root), str(tmp_path / "other"))
    os.mkdir(living.directory, 0o700)
    owner = lock_directory(living.directory)
    (root / "syncd.mine").mkdir()
    (root / "something").write_text("else")
    clear_all(str(root))
    assert not os.path.exists(place.directory)
    assert sorted(os.listdir(root)) == sorted([os.path.basename(living.directory), "something", "syncd.mine"])
    owner.close()


def test_a_start_clears_the_directories_beside_one_that_cannot_be_removed(root, tmp_path, monkeypatch):
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        os.mkdir(MemoryDirectory.here(str(root), str(tmp_path / name)).directory, 0o700)
    stuck = f"{root}/{os.listdir(root)[0]}"
    original = memory_copies.lock_directory

    def refused(directory):
        if directory == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", directory)
        return original(directory)

    monkeypatch.setattr(memory_copies, "lock_directory", refused)
    clear_all(str(root))
    assert [f"{root}/{name}" for name in os.listdir(root)] == [stuck]


def test_a_memory_directory_in_a_presence_must_be_of_this_boot_and_named():
    here = MemoryDirectory.here("/dev/shm", "/ckpt/job")
    assert memory_directory_of({MEMORY_KEY: asdict(here)}) == here
    assert here.boot == Process.current().boot
    for wrong in (
        {},
        {MEMORY_KEY: "text"},
        {MEMORY_KEY: {"directory": here.directory}},
        {MEMORY_KEY: {"directory": 3, "boot": here.boot}},
        {MEMORY_KEY: {"directory": os.path.basename(here.directory), "boot": here.boot}},
        {MEMORY_KEY: {"directory": "/home/somebody", "boot": here.boot}},
        {MEMORY_KEY: asdict(MemoryDirectory(here.directory, "another"))},
        {MEMORY_KEY: asdict(MemoryDirectory(here.directory, ""))},
    ):
        assert memory_directory_of(wrong) is None


@pytest.mark.parametrize("root", ["/ckpt/a job/ü", "/", "/ckpt/" + "x" * 250])
def test_memory_directories_of_any_job_are_recognized_at_a_start(root, tmp_path):
    place = MemoryDirectory.here(str(tmp_path), root)
    os.mkdir(place.directory, 0o700)
    clear_all(str(tmp_path))
    assert os.listdir(tmp_path) == []
