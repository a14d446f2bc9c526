"""Steps that go to files and to memory in one pass: the same bytes, bounds, and files alone where memory fails."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from support.cli import environment

from syncd.errors import NonFiniteError, StorageError
from syncd.parts.memory.send import SLACK, MemoryCopies
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, read_manifest
from syncd.protocol.memory_copies import OWNER, copies_in, hold_copy, is_copy_of, lock_directory
from syncd.transports import host_memory
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.host_memory import FreeMemory, MemoryLeft, is_tmpfs, read_free_memory, refusal

pytestmark = pytest.mark.group("mounts")

MODES = ("background", "stream")
TENSORS = {
    "odd": torch.arange(5, dtype=torch.uint8),
    "large": torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512),
    "small": torch.ones(3, 3),
    "empty": torch.zeros(0, 4),
}
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def memory(job, shm):
    made = MemoryCopies(job, shm)
    assert made.open() == ""
    yield made
    made.close()
    assert os.listdir(shm) == []


@pytest.fixture(params=MODES)
def saver(request, job):
    made = StepSaver(job, 0, 1, mode=request.param, dtype=None, timeout=60)
    yield made
    with contextlib.suppress(Exception):
        made.close()


def save(saver, memory, step, told, *, attempt=None):
    """Save a step to files, and to memory where there is room; return why there was none."""
    attempt = attempt or f"save-{step}"
    problem = memory.make_room(step, attempt, SIZE)
    copy = None if problem else memory.copy(step, attempt, 1, told.append)
    tensors = {name: (tensor + step).to(tensor.dtype) for name, tensor in TENSORS.items()}
    save_both(saver, step, tensors, copy, attempt)
    return problem


def save_both(saver, step, tensors, copy, attempt=""):
    saver.save(step, attempt or f"save-{step}", tensors.items(), {"config.json": b"{}"}, copy)
    saver.wait()


def held(memory, job, step):
    """Return whether memory has a step, whole."""
    found = hold_copy(memory.memory_directory, read_manifest(job.disk, job.step(step)))
    if found is None:
        return False
    found.close()
    return True


def test_an_in_memory_copy_has_the_digests_of_the_step(job, memory, saver):
    told = []
    for step in (1, 2):
        assert save(saver, memory, step, told) == ""
        manifest = read_manifest(job.disk, job.step(step))
        path = memory.memory_directory.copy(step, f"save-{step}")
        assert is_copy_of(path, manifest)
        assert damaged_files(job.disk, path, manifest) == []
        assert damaged_files(job.disk, job.step(step), manifest) == []
        assert held(memory, job, step)
        assert (saver.sent.step, saver.sent.size) == (step, SIZE)
    assert told == []


def test_the_newest_two_copies_and_those_in_use_are_kept(job, memory, saver):
    for step in (1, 2, 3):
        save(saver, memory, step, [])
    assert [held(memory, job, step) for step in (1, 2, 3)] == [False, True, True]
    reader = hold_copy(memory.memory_directory, read_manifest(job.disk, job.step(2)))
    save(saver, memory, 4, [])
    save(saver, memory, 5, [])
    assert [held(memory, job, step) for step in (2, 3, 4, 5)] == [True, False, True, True]
    reader.close()
    save(saver, memory, 6, [])
    assert [held(memory, job, step) for step in (2, 4, 5, 6)] == [False, False, True, True]


def test_a_copy_beyond_the_memory_limit_falls_back_to_files(job, shm, saver):
    """There is room for one copy: the one before goes for it, unless it is read."""
    memory = MemoryCopies(job, shm, limit=SIZE + SLACK)
    assert memory.open() == ""
    for step in (1, 2):
        assert save(saver, memory, step, []) == ""
    assert [held(memory, job, step) for step in (1, 2)] == [False, True]
    reader = hold_copy(memory.memory_directory, read_manifest(job.disk, job.step(2)))
    assert "copies may take" in save(saver, memory, 3, [])
    assert read_manifest(job.disk, job.step(3)).attempt == "save-3"
    assert not held(memory, job, 3)
    reader.close()
    memory.close()
    assert os.listdir(shm) == []


def test_a_directory_that_is_no_tmpfs_is_refused(job, tmp_path):
    if is_tmpfs(str(tmp_path)):
        pytest.skip("temporary files are in memory here")
    assert "is not on a tmpfs" in MemoryCopies(job, str(tmp_path)).open()


def test_a_ramfs_which_tells_no_size_is_refused_before_the_first_save(job, mounted):
    assert "is not on a tmpfs" in MemoryCopies(job, mounted("ramfs")).open()


@pytest.fixture
def mounted(tmp_path):
    """Mounts a file system in memory, and returns where it is."""
    place = tmp_path / "mounted"

    def mount(kind, *options):
        place.mkdir()
        command = ["mount", "-t", kind, *options, kind, place]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"nothing can be mounted here: {error}")
        return str(place)

    yield mount
    if place.is_mount():
        subprocess.run(["umount", place], check=True, timeout=30)


@pytest.fixture
def little(mounted):
    """A directory in memory that takes half a step."""
    return mounted("tmpfs", "-o", f"size={SIZE // 2}")


def test_a_full_memory_file_system_falls_back_to_files(job, little, saver):
    """Once by what is asked before, once by the file system itself, in the midst of a save."""
    memory, told = MemoryCopies(job, little, limit=1 << 30), []
    assert memory.open() == ""
    assert "bytes free" in save(saver, memory, 1, told)
    assert told == []
    os.makedirs(f"{memory.memory_directory.copy(2, 'save-2')}/actor/.receipts", 0o700)
    memory.make_room = lambda *_: ""
    assert save(saver, memory, 2, told) == ""
    assert len(told) == 1
    assert "No space left" in told[0]
    for step in (1, 2):
        assert damaged_files(job.disk, job.step(step), read_manifest(job.disk, job.step(step))) == []
        assert not held(memory, job, step)
    memory.close()
    assert os.listdir(little) == []


def test_the_copy_of_a_save_that_failed_takes_the_place_of_no_other(job, memory, saver):
    save(saver, memory, 1, [])
    memory.make_room(2, "save-2", SIZE)
    damaged = {**TENSORS, "small": torch.full((3, 3), float("nan"))}
    copy = memory.copy(2, "save-2", 1, lambda _: None)
    with pytest.raises(NonFiniteError):
        save_both(saver, 2, damaged, copy)
    save(saver, memory, 3, [])
    assert [held(memory, job, step) for step in (1, 3)] == [True, True]
    assert copies_in(memory.memory_directory.directory) == ["1-save-1", "3-save-3"]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_for_which_the_disk_has_no_room_leaves_no_memory_in_use(little, memory, mode):
    """A file that is open takes its memory after it was removed, too."""
    with contextlib.closing(StepSaver(Job.at(little), 0, 1, mode=mode, dtype=None, timeout=60)) as saver:
        for step in (1, 2):
            with pytest.raises(StorageError, match="No space left"):
                save(saver, memory, step, [])
        assert copies_in(memory.memory_directory.directory) == ["2-save-2"]
        assert [path for path in opened() if "/model-" in path] == []


def opened():
    """Return what the descriptors of this process lead to."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_a_write_error_discards_the_copy_and_keeps_the_step(job, memory, saver, monkeypatch):
    told = []
    monkeypatch.setattr("syncd.transports.files.shard.NewFile.write", failing)
    assert save(saver, memory, 1, told) == ""
    assert told == ["[Errno 5] Input/output error"]
    assert not held(memory, job, 1)
    assert damaged_files(job.disk, job.step(1), read_manifest(job.disk, job.step(1))) == []
    monkeypatch.undo()
    save(saver, memory, 2, told)
    assert held(memory, job, 2)


def failing(self, piece, offset):
    """Fail on what is written to memory alone."""
    if self._mode.name == "memory":
        raise OSError(5, "Input/output error")
    while piece:
        done = os.pwritev(self._descriptor, [piece[: self._mode.limit]], offset, self._mode.write_flags)
        piece, offset = piece[done:], offset + done


def test_two_ranks_write_one_copy(job, memory):
    savers = [StepSaver(job, rank, 2, dtype=None, timeout=60) for rank in range(2)]
    assert memory.make_room(1, "save-1", SIZE) == ""
    for saver in savers:
        saver.save(1, "save-1", TENSORS.items(), {}, memory.copy(1, "save-1", 2, pytest.fail))
    for saver in savers:
        saver.close()
    manifest = read_manifest(job.disk, job.step(1))
    assert manifest.world_size == 2
    assert damaged_files(job.disk, memory.memory_directory.copy(1, "save-1"), manifest) == []
    assert held(memory, job, 1)


def test_a_second_trainer_cannot_open_the_copies(job, memory, shm):
    second = MemoryCopies(job, shm)
    second._clock = Hurried()
    assert "another trainer holds" in second.open()
    assert lock_directory(memory.memory_directory.directory) is None
    assert OWNER in os.listdir(memory.memory_directory.directory)


class Hurried:
    """A clock that sleeping moves."""

    at = 0.0

    def monotonic(self):
        return self.at

    def sleep(self, seconds):
        self.at += seconds


def test_a_start_removes_the_copies_of_a_killed_trainer_unless_in_use(job, shm, saver):
    killed = MemoryCopies(job, shm)
    assert killed.open() == ""
    save(saver, killed, 1, [])
    killed.make_room(2, "save-2", SIZE)
    killed._owner.close()  # as its end does
    reader = hold_copy(killed.memory_directory, read_manifest(job.disk, job.step(1)))
    following = MemoryCopies(job, shm)
    assert following.open() == ""
    assert copies_in(following.memory_directory.directory) == ["1-save-1"], "it is read"
    reader.close()
    assert following.make_room(3, "save-3", SIZE) == ""
    assert copies_in(following.memory_directory.directory) == ["3-save-3"]
    following.close()
    assert os.listdir(shm) == []


ENDS = """
import sys
from syncd.protocol.layout import Job
from syncd.parts.memory.send import MemoryCopies
memory = MemoryCopies(Job.at(sys.argv[1]), sys.argv[2])
assert memory.open() == ""
assert memory.make_room(1, "save-1", 100) == ""
raise SystemExit(int(len(__import__("os").listdir(sys.argv[2]))))
"""


def test_a_trainer_that_ends_with_an_error_leaves_no_copies(job, shm):
    command = [sys.executable, "-c", ENDS, job.root, shm]
    assert subprocess.run(command, env=environment(), timeout=100, check=False).returncode == 1
    assert os.listdir(shm) == []


GIB = 1 << 30
HOST = MemoryLeft(left=50 * GIB, total=100 * GIB)
PLENTY = FreeMemory(HOST, None, free=50 * GIB)


@pytest.mark.parametrize(
    ("room", "size", "used", "limit", "said"),
    [
        (PLENTY, GIB, GIB, 2 * GIB, ""),
        (PLENTY, GIB, GIB, 2 * GIB - 1, "copies may take"),
        (PLENTY, 46 * GIB, 0, 60 * GIB, "the host has"),
        (PLENTY, 45 * GIB, 0, 60 * GIB, ""),
        (PLENTY, 51 * GIB, 0, 60 * GIB, "the file system has"),
        (
            FreeMemory(HOST, MemoryLeft(3 * GIB - 1, 20 * GIB), 50 * GIB),
            2 * GIB,
            0,
            60 * GIB,
            "its control group has",
        ),
        (FreeMemory(HOST, MemoryLeft(3 * GIB, 20 * GIB), 50 * GIB), 2 * GIB, 0, 60 * GIB, ""),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_with_the_reason(room, size, used, limit, said):
    found = refusal(room, size, used, limit)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_free_memory_is_read_from_this_machine(shm):
    found = read_free_memory(shm)
    assert 0 < found.host.left <= found.host.total
    assert found.free > 0
    assert found.control_group is None or found.control_group.left <= found.control_group.total


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_left_is_read_from_every_limited_control_group(tmp_path, monkeypatch, version):
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    groups = {"": ("max", 9), "a": (1000, 400), "a/b": (2000, 1900), "a/b/c": ("max", 5)}
    for group, figures in groups.items():
        (tmp_path / group).mkdir(exist_ok=True)
        for name, figure in zip(names, figures, strict=False):
            (tmp_path / group / name).write_text(f"{figure}\n")
        (tmp_path / group / "memory.stat").write_text(f"anon 7\n{names[2]} 100\n")
    found = sorted(host_memory._left(str(tmp_path), "/a/b/c", names))
    assert found == [MemoryLeft(200, 2000), MemoryLeft(700, 1000)]
    assert list(host_memory._left(str(tmp_path), "/elsewhere", names)) == []
