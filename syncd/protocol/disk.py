"""The seam to the file system: every byte of the protocol goes through a `Disk`.

`LocalDisk` is the real one. The simulator has another with a virtual cache per host, so that the code that
runs in production is the code whose schedules are searched.

What the protocol relies on is listed by the methods below and nothing else: rename inside one file system is
atomic, `rmdir` of a full directory fails, and a file closed by one host is seen by another that lists the
directory and then opens the file. See docs/protocol.md, "What the file system must give".
"""

import contextlib
import errno
import os
import stat as stat_module
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

from syncd.errors import CorruptDataError
from syncd.protocol.modes import UMASK, Modes, settle, settle_file

Kind = Literal["file", "directory", "other"]
Data = bytes | Iterable[bytes | memoryview]
"""A whole content, or its pieces in order for what should not be in memory at once."""

T = TypeVar("T")

DOCUMENT_LIMIT = 16 << 20
"""The largest JSON document that is read, in bytes; what is larger is corrupt or hostile."""

TRANSIENT = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})
"""Errors that a network file system gives for a moment and that a second attempt from the path cures."""

_PAUSES = (0.0, 0.002, 0.01, 0.05, 0.2)
"""Seconds before each further attempt. While a client waits for the answer to a rename of its own, the name still
leads to the file before, which the server has removed: attempts without a pause all fall into that moment."""

MISSING = (FileNotFoundError, NotADirectoryError)
"""What a name that is not there raises."""


class Entry(NamedTuple):
    """One name of a directory. A symbolic link is `other`: links are never followed."""

    name: str
    kind: Kind


class FileStat(NamedTuple):
    """What is compared of a file: `kind`, `size` in bytes, and what tells it from the next of its name."""

    kind: Kind
    size: int
    mtime_ns: int
    inode: int


class Disk(Protocol):
    """What the protocol asks of a file system. Paths are absolute strings; failures are `OSError`."""

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        """Return the whole of a regular file.

        Raises:
            CorruptDataError: It is larger than `limit` bytes, or not a regular file.
            OSError: It cannot be read.
        """

    def read_at(self, path: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes of a regular file from `offset`; fewer only at its end."""

    def stat(self, path: str) -> FileStat:
        """Return the stat of `path` itself, following no link."""

    def born(self, path: str) -> int:
        """Return when the file system made what is at `path`, in nanoseconds, 0 where it does not say."""

    def list(self, path: str) -> list[Entry]:
        """Return the entries of a directory as its server has them now, in no order."""

    def refresh(self, path: str) -> None:
        """Make the next opens below this directory see what other hosts have closed (close-to-open)."""

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        """Write `data` durably to a temporary file, then rename it over `path`.

        Args:
            path: The name that readers use.
            data: The whole new content, or its pieces.
            via: The directory of the temporary file: the one of `path` unless given. Whoever removes
                that directory makes this call fail, which is how a deposed leader is fenced.
            private: Whether only this user may read it.
        """

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory, and count one that happened in spite of an error as done."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents where they are missing, durably."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def unlink(self, path: str) -> None:
        """Remove a name that is not a directory."""

    def sync_directory(self, path: str) -> None:
        """Make the names of a directory durable."""

    def adopt(self, path: str) -> None:
        """Give a file or directory that was made otherwise the mode and group of the job's policy."""

    def free(self, path: str) -> int:
        """Return the bytes that this user may still write to the file system of `path`."""

    def inodes(self, path: str) -> int | None:
        """Return how many files this user may still make there, None where no number bounds it."""


class Clock(Protocol):
    """Time as the protocol uses it: durations on this host's own clock, and a date for people to read."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never steps."""

    def time(self) -> float:
        """Return seconds since the epoch. Never compared between hosts."""

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""


class SystemClock:
    """This host's clock. Durations count suspended time too, so a paused daemon knows it was away."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def again(operation: Callable[[], T], sleep: Callable[[float], None] | None = None) -> T:
    """Run an operation that starts from a path, a few times while it meets transient errors."""
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
    """

    _roots: tuple[str, ...] = ()
    _modes: Callable[[], Modes] = staticmethod(lambda: UMASK)

    def __init__(self, roots: Iterable[str] = (), modes: Callable[[], Modes] | None = None) -> None:
        self._roots = tuple(sorted(roots, key=len, reverse=True))
        if modes is not None:
            self._modes = modes

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        return again(lambda: _read(path, limit))

    def read_at(self, path: str, offset: int, length: int) -> bytes:
        return again(lambda: _read_at(path, offset, length))

    def stat(self, path: str) -> FileStat:
        # The most frequent call of all: what attempts it again is asked for only where the first one fails.
        try:
            found = os.lstat(path)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            found = again(partial(os.lstat, path))
        return FileStat(_kind(found.st_mode), found.st_size, found.st_mtime_ns, found.st_ino)

    def born(self, path: str) -> int:
        from syncd.protocol.birth import born_at  # noqa: PLC0415 - a command that does not ask loads no ctypes

        return born_at(path)

    def list(self, path: str) -> list[Entry]:
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
            _write(temporary, data, Modes(_PRIVATE, exact=True) if private else modes)
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
        settle(path, modes)  # whoever made it may have been killed before it was settled

    def _make_directory(self, path: str, modes: Modes) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._make_directory(parent, modes)
        try:
            os.mkdir(path, modes.directory & 0o777)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        settle(path, modes)
        self.sync_directory(parent)

    def remove_directory(self, path: str) -> None:
        self._guard(path)
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        self._guard(path)
        os.unlink(path)

    def adopt(self, path: str) -> None:
        self._guard(path)
        settle(path, self._modes())

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
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def inodes(self, path: str) -> int | None:
        found = os.statvfs(path)
        return found.f_favail if found.f_files else None

    def _guard(self, *paths: str) -> None:
        """Refuse a path on which a link lies between its root and its last part."""
        for path in paths:
            root = next((root for root in self._roots if is_below(path, root)), None)
            if root is not None:
                _refuse_links(path, len(root.rstrip("/")) + 1)


def temporary_name(name: str) -> str:
    """Return a name no one else uses for the file that will become `name`."""
    return f".{name}.{uuid.uuid4().hex[:12]}.tmp"


def is_temporary(name: str) -> bool:
    """Say whether a name was made by `temporary_name`."""
    return name.startswith(".") and name.endswith(".tmp")


def exists(disk: Disk, path: str) -> bool:
    """Say whether there is anything at `path`. Not for polling: networks cache absence."""
    try:
        disk.stat(path)
    except MISSING:
        return False
    return True


def is_below(path: str, root: str) -> bool:
    """Say whether an absolute path is `root` or lies inside it."""
    return path == root or path.startswith(f"{root.rstrip('/')}/")


def list_if_there(disk: Disk, path: str) -> list[Entry]:
    """Return the entries of a directory, none when it is missing."""
    try:
        return disk.list(path)
    except MISSING:
        return []


def remove_tree(disk: Disk, path: str) -> int:
    """Remove whatever is at `path`, following no link, and return the number of files removed.

    What vanishes meanwhile is fine; what cannot be removed yet (a file that a reader on this host holds
    open stays as `.nfs*` until it is closed) raises, and a later call goes on from there.
    """
    removed = 0
    if _is_no_directory(disk, path):
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(path)
            removed += 1
        return removed
    for entry in list_if_there(disk, path):
        child = f"{path}/{entry.name}"
        if entry.kind == "directory":
            removed += remove_tree(disk, child)
        else:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(child)
                removed += 1
    with contextlib.suppress(FileNotFoundError):
        disk.remove_directory(path)
    return removed


def _is_no_directory(disk: Disk, path: str) -> bool:
    # A listing would follow a link; absence, which may be a cached one, is left for the listing to find.
    try:
        return disk.stat(path).kind != "directory"
    except MISSING:
        return False


def _refuse_links(path: str, start: int) -> None:
    while (end := path.find("/", start)) >= 0:
        part, start = path[:end], end + 1
        try:
            is_link = stat_module.S_ISLNK(again(partial(os.lstat, part)).st_mode)
        except MISSING:
            return
        if is_link:
            raise OSError(errno.ELOOP, "a symbolic link stands where a directory of the job must be", part)


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


def _open_regular_size(descriptor: int, path: str) -> int:
    found = os.fstat(descriptor)
    if not stat_module.S_ISREG(found.st_mode):
        raise CorruptDataError("not a regular file", path=path)
    return found.st_size


def _open_error(error: OSError, path: str) -> Exception:
    if error.errno in (errno.ELOOP, errno.ENXIO):
        return CorruptDataError("not a regular file", path=path)
    return error


def _read(path: str, limit: int) -> bytes:
    try:
        descriptor = os.open(path, _READ | os.O_CLOEXEC)
    except OSError as error:
        raise _open_error(error, path) from None
    try:
        size = _open_regular_size(descriptor, path)
        if size > limit:
            raise CorruptDataError(f"{size} bytes where at most {limit} are expected", path=path)
        return _drain(descriptor, size, limit)
    finally:
        os.close(descriptor)


def _drain(descriptor: int, size: int, limit: int) -> bytes:
    # One read is the whole of a settled file; a file that grows meanwhile is read to its end or its limit.
    data = os.read(descriptor, size + 1)
    while len(data) > size and len(data) <= limit:
        more = os.read(descriptor, limit + 1 - len(data))
        if not more:
            break
        data += more
    return data[:limit]


def _read_at(path: str, offset: int, length: int) -> bytes:
    try:
        descriptor = os.open(path, _READ | os.O_CLOEXEC)
    except OSError as error:
        raise _open_error(error, path) from None
    try:
        _open_regular_size(descriptor, path)
        parts = []
        while length > 0 and (part := os.pread(descriptor, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _list(path: str) -> list[Entry]:
    with (
        _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor,
        os.scandir(descriptor) as entries,
    ):
        return [Entry(entry.name, _entry_kind(entry)) for entry in entries]


def _entry_kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "directory" if entry.is_dir(follow_symlinks=False) else "other"


def _refresh(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


_PRIVATE = 0o600


def _write(path: str, data: Data, modes: Modes) -> None:
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, modes.file) as descriptor:
        settle_file(descriptor, modes)
        for part in (data,) if isinstance(data, bytes) else data:
            _write_all(descriptor, memoryview(part))
        os.fsync(descriptor)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _is_at(path: str, held: int) -> bool:
    """Say whether a path leads to what is open: no other with its number, which a server may have given out again."""
    try:
        named, mine = os.lstat(path), os.fstat(held)
    except OSError:
        return False
    return os.path.samestat(named, mine) and mine.st_nlink > 0 and named.st_mtime_ns == mine.st_mtime_ns
