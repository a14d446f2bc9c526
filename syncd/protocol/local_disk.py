"""The real file system and the real clock.

Reads retry transient errors of network file systems, links are refused where a job must not be left, and what is made
gets the modes of the job's policy.
"""

import contextlib
import errno
import functools
import os
import stat as stat_module
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from syncd.errors import CorruptDataError
from syncd.protocol.disk import (
    DOCUMENT_LIMIT,
    MISSING,
    Data,
    DirectoryEntry,
    FileStat,
    Kind,
    is_below,
    temporary_name,
)
from syncd.protocol.permissions import PRIVATE, UMASK, Modes, apply_to_file, apply_to_path

T = TypeVar("T")

TRANSIENT = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})
"""Errors that a network file system returns for a moment and that a retry from the path cures."""

_PAUSES = (0.0, 0.002, 0.01, 0.05, 0.2)
"""Seconds before each retry. While a client waits for the answer to its own rename, the name still leads to the
file before, which the server has removed: retries without a pause would all fall into that moment."""


class SystemClock:
    """This host's clock. Durations count suspended time too, so a paused daemon knows it was away."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def again(operation: Callable[[], T], sleep: Callable[[float], None] | None = None) -> T:
    """Run an operation that starts from a path, and retry it a few times on transient errors."""
    for pause in _PAUSES:
        try:
            return operation()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        (sleep or time.sleep)(pause)
    return operation()


class LocalDisk:
    """A mounted file system, local or not.

    Args:
        roots: Directories below which nothing is listed, made, changed or removed by way of a symbolic link: whoever
            can write there must not lead this process out of it. What is read may still be reached through one.
        modes: What is made is made with these, or with what this returns at the time.
        no_delegations: Whether documents are read past the cache (O_DIRECT): an NFSv4 client then asks its server for
            no delegation, and whoever replaces the document need not wait 0.1 s for its recall.
    """

    _roots: tuple[str, ...] = ()
    _read_flags = 0
    _modes: Callable[[], Modes] = staticmethod(lambda: UMASK)

    def __init__(
        self,
        roots: Iterable[str] = (),
        modes: Callable[[], Modes] | None = None,
        *,
        no_delegations: bool = False,
    ) -> None:
        self._roots = tuple(sorted(roots, key=len, reverse=True))
        self._read_flags = os.O_DIRECT if no_delegations else 0
        if modes is not None:
            self._modes = modes

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        return again(lambda: _read(path, limit, self._read_flags))

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        return again(lambda: _read_at(path, offset, length, ahead=ahead))

    def stat(self, path: str) -> FileStat:
        # The most frequent call of all: the retry is set up only where the first attempt fails.
        try:
            status = os.lstat(path)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            status = again(partial(os.lstat, path))
        return FileStat(_kind(status.st_mode), status.st_size, status.st_mtime_ns, status.st_ino)

    def born(self, path: str) -> int:
        return _born_at(path)

    def list(self, path: str) -> list[DirectoryEntry]:
        self._guard(path)
        return again(lambda: _list(path))

    def refresh(self, path: str) -> None:
        again(lambda: _refresh(path))

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        directory, name = os.path.split(path)
        temporary = f"{via or directory}/{temporary_name(name)}"
        self._guard(path, temporary)
        modes = self._modes()
        try:
            _write(temporary, data, PRIVATE if private else modes, path)
            try:
                self.rename(temporary, path)
            except IsADirectoryError:
                os.rename(path, f"{path}.{uuid.uuid4().hex[:12]}.aside")
                self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync_directory(directory)

    def rename(self, source: str, target: str) -> None:
        self._guard(source, target)
        # Held open meanwhile: else what is removed and what is made next may have the same number.
        held = again(lambda: os.open(source, _NAMED))
        try:
            os.rename(source, target)
        except OSError:
            # A network file system may lose the answer to a rename that its server has done.
            if not _is_at(target, held):
                raise
        finally:
            os.close(held)

    def make_directory(self, path: str) -> None:
        self._guard(f"{path}/")
        modes = self._modes()
        self._make_directory(path, modes)
        apply_to_path(path, modes)  # its maker may have been killed before it did this

    def _make_directory(self, path: str, modes: Modes) -> None:
        missing = list[str]()
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            try:
                os.mkdir(path, modes.directory & 0o777)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise
            apply_to_path(path, modes)
            self.sync_directory(os.path.dirname(path))

    def remove_directory(self, path: str) -> None:
        self._guard(path)
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        self._guard(path)
        os.unlink(path)

    def adopt(self, path: str) -> None:
        self._guard(path)
        apply_to_path(path, self._modes())

    def sync_directory(self, path: str) -> None:
        with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some FUSE and cluster file systems refuse to sync a directory; their renames are
                # synchronous. On a mount that is read-only here there is nothing of ours to sync.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
                    raise

    def free(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def inodes(self, path: str) -> int | None:
        status = os.statvfs(path)
        return status.f_favail if status.f_files else None

    def _guard(self, *paths: str) -> None:
        """Refuse a path on which a link lies between its root and its last part."""
        for path in paths:
            root = next((root for root in self._roots if is_below(path, root)), None)
            if root is not None:
                _refuse_links(path, len(root.rstrip("/")) + 1)


def _refuse_links(path: str, start: int) -> None:
    while (end := path.find("/", start)) >= 0:
        part, start = path[:end], end + 1
        try:
            is_link = stat_module.S_ISLNK(again(partial(os.lstat, part)).st_mode)
        except MISSING:
            return
        if is_link:
            raise OSError(errno.ELOOP, "a symbolic link is where a directory of the job must be", part)


def _kind(mode: int) -> Kind:
    if stat_module.S_ISREG(mode):
        return "file"
    return "directory" if stat_module.S_ISDIR(mode) else "other"


@contextlib.contextmanager
def _opened(path: str, flags: int, mode: int = 0o644) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# What a name leads to, be it a link or a FIFO; nothing is opened.
_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# A FIFO must not block the open, and a link must not be followed.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def _opened_to_read(path: str, flags: int = 0) -> Iterator[tuple[int, int]]:
    try:
        descriptor = _open_to_read(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptDataError("not a regular file", path=path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat_module.S_ISREG(status.st_mode):
            raise CorruptDataError("not a regular file", path=path)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _open_to_read(path: str, flags: int) -> int:
    try:
        return os.open(path, _READ | os.O_CLOEXEC | flags)
    except OSError as error:
        # What cannot be read past a cache: a FIFO, or a file of a client that has no such reads.
        if not flags or error.errno != errno.EINVAL:
            raise
    return os.open(path, _READ | os.O_CLOEXEC)


def _read(path: str, limit: int, flags: int = 0) -> bytes:
    with _opened_to_read(path, flags) as (descriptor, size):
        if size > limit:
            raise CorruptDataError(f"{size} bytes where at most {limit} are expected", path=path)
        # One read is the whole of a settled file; a file that grows meanwhile is read to its end or its limit.
        data = os.read(descriptor, size + 1)
        while len(data) > size and len(data) <= limit:
            more = os.read(descriptor, limit + 1 - len(data))
            if not more:
                break
            data += more
        return data[:limit]


def _read_at(path: str, offset: int, length: int, *, ahead: bool) -> bytes:
    parts = []
    with _opened_to_read(path) as (descriptor, _):
        if not ahead:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        while length > 0 and (part := os.pread(descriptor, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _list(path: str) -> list[DirectoryEntry]:
    with (
        _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor,
        os.scandir(descriptor) as entries,
    ):
        return [DirectoryEntry(entry.name, _entry_kind(entry)) for entry in entries]


def _entry_kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "directory" if entry.is_dir(follow_symlinks=False) else "other"


def _refresh(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _write(temporary: str, data: Data, modes: Modes, path: str) -> None:
    """Write a temporary file; errors of writing name what it is for."""
    with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, modes.file) as descriptor:
        apply_to_file(descriptor, modes)
        for part in (data,) if isinstance(data, bytes) else data:
            with _named_errors(path):
                _write_part(descriptor, part)
        with _named_errors(path):
            os.fsync(descriptor)


def write_all_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at a place of an open file; one call may write fewer."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _write_part(descriptor: int, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Name the path in errors of calls that know a descriptor alone."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def _is_at(path: str, held: int) -> bool:
    """Return whether a path leads to the open file, not to another one: a server may reuse its inode number."""
    try:
        named, mine = os.lstat(path), os.fstat(held)
    except OSError:
        return False
    return os.path.samestat(named, mine) and mine.st_nlink > 0 and named.st_mtime_ns == mine.st_mtime_ns


_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_STATX_SIZE = 256
_MASK, _SECONDS, _NANOSECONDS = slice(0, 4), slice(80, 88), slice(88, 92)
"""Where `struct statx` has what it filled in, and the time of birth."""


def _born_at(path: str) -> int:
    """Return when its file system made what is at a path, in nanoseconds since the epoch.

    It is 0 where the file system does not say, or nothing is there.
    """
    import ctypes  # noqa: PLC0415 - a command that does not ask loads no ctypes

    statx, buffer = _statx(), ctypes.create_string_buffer(_STATX_SIZE)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, buffer) != 0:
        return 0
    data = buffer.raw
    if not int.from_bytes(data[_MASK], "little") & _STATX_BTIME:
        return 0
    seconds = int.from_bytes(data[_SECONDS], "little", signed=True)
    return seconds * 10**9 + int.from_bytes(data[_NANOSECONDS], "little")


@functools.cache
def _statx() -> Callable[..., int] | None:
    import ctypes  # noqa: PLC0415

    # Python has no call for it before 3.15.
    return getattr(ctypes.CDLL(None), "statx", None)
