"""The real disk beyond the contract that it shares with the simulator's: modes, links, lost answers."""

import errno
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import CorruptDataError
from syncd.protocol import local_disk as subject
from syncd.protocol.disk import DirectoryEntry, is_below, is_temporary, remove_tree, temporary_name
from syncd.protocol.local_disk import LocalDisk, SystemClock, again

DISK = LocalDisk()


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def with_umask(mask, act):
    before = os.umask(mask)
    try:
        return act()
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_the_mode_of_new_files(root, mask, mode):
    with_umask(mask, lambda: DISK.replace(f"{root}/a", b"x"))
    assert stat.S_IMODE(os.stat(f"{root}/a").st_mode) == mode


@pytest.mark.parametrize("ahead", [True, False])
def test_without_ahead_the_kernel_is_told_to_fetch_nothing_beyond_what_is_read(root, monkeypatch, ahead):
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *said: told.append(said))
    DISK.replace(f"{root}/a", b"abcdef")
    assert DISK.read_at(f"{root}/a", 2, 3, ahead=ahead) == b"cde"
    assert told == ([] if ahead else [(0, 0, os.POSIX_FADV_RANDOM)])


def test_content_is_synced_before_the_rename(root, monkeypatch):
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1]
        )
    DISK.replace(f"{root}/a", b"x")
    assert calls == ["fsync", "rename", "fsync"]


def test_an_open_reader_keeps_the_old_content_during_a_replace(root):
    DISK.replace(f"{root}/a", b"old" * 1000)
    with open(f"{root}/a", "rb") as reader:
        DISK.replace(f"{root}/a", b"new")
        assert reader.read() == b"old" * 1000
    assert DISK.read(f"{root}/a") == b"new"


def test_a_replace_replaces_a_symbolic_link_without_following_it(root):
    os.symlink("target", f"{root}/link")
    DISK.replace(f"{root}/link", b"x")
    assert not os.path.exists(f"{root}/target")
    assert DISK.stat(f"{root}/link").kind == "file"


def test_reading_a_special_file_is_refused_without_blocking(root):
    os.mkfifo(f"{root}/fifo")
    assert DISK.stat(f"{root}/fifo").kind == "other"
    for path in (f"{root}/fifo", "/dev/zero", root):
        with pytest.raises(CorruptDataError, match="not a regular file"):
            DISK.read(path)
        with pytest.raises(CorruptDataError, match="not a regular file"):
            DISK.read_at(path, 0, 1)


def test_a_disk_without_delegations_reads_past_the_cache_and_refuses_what_is_no_file(root, monkeypatch):
    flags, real = [], os.open

    def noting(path, how, *more):
        flags.append(how)
        return real(path, how & ~os.O_DIRECT, *more)

    monkeypatch.setattr(os, "open", noting)
    DISK.replace(f"{root}/a", b"x")
    flags.clear()
    assert LocalDisk(no_delegations=True).read(f"{root}/a") == b"x"
    assert DISK.read(f"{root}/a") == b"x"
    assert [bool(how & os.O_DIRECT) for how in flags] == [True, False]
    monkeypatch.undo()
    os.mkfifo(f"{root}/fifo")
    for path in (f"{root}/fifo", "/dev/zero", root):
        with pytest.raises(CorruptDataError, match="not a regular file"):
            LocalDisk(no_delegations=True).read(path)


@given(st.binary(max_size=100), st.integers(0, 120), st.integers(0, 120))
def test_read_at_equals_a_slice_of_the_whole_file(tmp_path_factory, data, offset, length):
    path = str(tmp_path_factory.getbasetemp() / "part")
    with open(path, "wb") as file:
        file.write(data)
    assert DISK.read_at(path, offset, length) == data[offset : offset + length]
    assert DISK.read(path) == data


def test_a_file_that_grows_during_a_read_is_read_to_its_end(root, monkeypatch):
    path = f"{root}/a"
    DISK.replace(path, b"12345")
    real = os.read

    def growing(descriptor, length):
        if os.path.getsize(path) == 5:
            with open(path, "ab") as file:
                file.write(b"6789")
        return real(descriptor, length)

    monkeypatch.setattr(os, "read", growing)
    assert DISK.read(path) == b"123456789"


def test_short_writes_are_continued(root, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    DISK.replace(f"{root}/a", [b"12345", b"", b"678"])
    assert DISK.read(f"{root}/a") == b"12345678"


@pytest.mark.parametrize("broken", ["write", "fsync", "rename"])
def test_a_failed_replace_keeps_the_old_content_and_no_temporary_file(root, monkeypatch, broken):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    DISK.replace(f"{root}/a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(OSError, match="No space") as caught:
            DISK.replace(f"{root}/a", b"new")
    assert caught.value.filename == (f"{root}/a" if broken != "rename" else None)
    assert os.listdir(root) == ["a"]
    assert DISK.read(f"{root}/a") == b"old"


def test_a_rename_with_a_lost_answer_counts_as_done(root, monkeypatch):
    real = os.rename

    def lossy(source, target):
        real(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)

    DISK.replace(f"{root}/a", b"x")
    monkeypatch.setattr(os, "rename", lossy)
    DISK.rename(f"{root}/a", f"{root}/b")
    assert DISK.read(f"{root}/b") == b"x"


def test_a_failed_rename_raises_and_keeps_the_target(root, monkeypatch):
    def failing(source, target):
        raise OSError(errno.EIO, "Input/output error")

    DISK.replace(f"{root}/a", b"x")
    DISK.replace(f"{root}/b", b"y")
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        DISK.rename(f"{root}/a", f"{root}/b")
    assert DISK.read(f"{root}/b") == b"y"


def flaky(times, number):
    left = [times]

    def operation():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, "passing")
        return "done"

    return operation


@pytest.mark.parametrize("number", sorted(subject.TRANSIENT))
def test_transient_errors_are_retried_a_bounded_number_of_times(number):
    waits: list[float] = []
    assert again(flaky(5, number), waits.append) == "done"
    assert waits == sorted(waits)
    assert sum(waits) < 1
    with pytest.raises(OSError, match="passing"):
        again(flaky(6, number), waits.append)


def test_other_errors_are_not_retried():
    operation = flaky(1, errno.EIO)
    with pytest.raises(OSError, match="passing"):
        again(operation)
    assert operation() == "done"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_directory_sync_is_tolerated(root, monkeypatch, number):
    def fail(descriptor):
        raise OSError(number, "not here")

    monkeypatch.setattr(os, "fsync", fail)
    DISK.sync_directory(root)
    monkeypatch.setattr(
        subject.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    )
    with pytest.raises(OSError, match="broken"):
        DISK.sync_directory(root)


def test_a_directory_made_concurrently_by_another_process_is_accepted(root, monkeypatch):
    real = os.mkdir

    def twice(path, *args):
        real(path, *args)
        real(path, *args)

    monkeypatch.setattr(os, "mkdir", twice)
    DISK.make_directory(f"{root}/a/b")
    assert os.path.isdir(f"{root}/a/b")


def test_a_file_in_the_way_of_a_directory_is_an_error(root):
    DISK.replace(f"{root}/a", b"")
    for path in (f"{root}/a", f"{root}/a/b"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            DISK.make_directory(path)


def test_a_tree_is_removed_without_following_links(root):
    os.makedirs(f"{root}/tree/sub")
    os.makedirs(f"{root}/outside")
    DISK.replace(f"{root}/outside/kept", b"")
    DISK.replace(f"{root}/tree/sub/a", b"")
    os.symlink(f"{root}/outside", f"{root}/tree/link")
    os.mkfifo(f"{root}/tree/fifo")
    assert remove_tree(DISK, f"{root}/tree") == 3
    assert DISK.list(root) == [DirectoryEntry("outside", "directory")]
    assert os.listdir(f"{root}/outside") == ["kept"]


def test_removing_a_tree_that_is_a_symbolic_link_keeps_its_target(root):
    os.makedirs(f"{root}/outside")
    DISK.replace(f"{root}/outside/kept", b"")
    os.symlink("outside", f"{root}/link")
    assert remove_tree(DISK, f"{root}/link") == 1
    assert os.listdir(root) == ["outside"]
    assert os.listdir(f"{root}/outside") == ["kept"]
    assert remove_tree(DISK, f"{root}/outside/kept") == 1


@pytest.mark.parametrize(
    ("path", "below", "expected"),
    [
        ("/a", "/a", True),
        ("/a/b", "/a", True),
        ("/ab", "/a", False),
        ("/", "/a", False),
        ("/a", "/", True),
        ("/a/b", "/a/", True),
    ],
)
def test_is_below_compares_whole_path_components(path, below, expected):
    assert is_below(path, below) is expected


@given(st.text(alphabet=st.characters(exclude_characters="/\0"), min_size=1, max_size=20))
def test_temporary_names_are_hidden_and_unique(name):
    one, other = temporary_name(name), temporary_name(name)
    assert one != other
    assert one.startswith(".")
    assert is_temporary(one)


def test_the_system_clock_advances_with_sleep():
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.01
    assert clock.time() > 1.7e9


def test_a_reused_inode_is_not_taken_for_the_removed_directory(root, monkeypatch):
    """Two claims of a term: one is removed right before it takes its place, the other has its number by then."""
    os.mkdir(f"{root}/claim")

    def too_late(source, target):
        os.rmdir(source)
        os.mkdir(target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(os, "rename", too_late)
    with pytest.raises(FileNotFoundError):
        DISK.rename(f"{root}/claim", f"{root}/0000000002")
