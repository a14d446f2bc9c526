"""The seam to the file system: every byte of the protocol goes through a `Disk`.

`local_disk.LocalDisk` is the real one. The simulator of the tests has another with a virtual cache per host, so that
the code that runs in production is the code whose schedules are searched.

What the protocol relies on is listed by the methods below and nothing else: rename inside one file system is
atomic, `rmdir` of a full directory fails, and a file closed by one host is seen by another that lists the
directory and then opens the file. See docs/protocol.md, "Requirements on the file system".
"""

import contextlib
import errno
import uuid
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

Kind = Literal["file", "directory", "other"]
Data = bytes | Iterable[bytes | memoryview]
"""A whole content, or its pieces in order for what should not be in memory at once."""

DOCUMENT_LIMIT = 16 << 20
"""The largest JSON document that is read, in bytes; what is larger is corrupt or hostile."""

MISSING = (FileNotFoundError, NotADirectoryError)  # what a name that is not there raises


class DirectoryEntry(NamedTuple):
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
        """Return the whole of a regular file."""

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        """Return up to `length` bytes of a regular file from `offset`; fewer only at its end.

        Without `ahead` the kernel is told to fetch nothing beyond them: another host reads what follows.
        """

    def stat(self, path: str) -> FileStat:
        """Return the stat of `path` itself, following no link."""

    def born(self, path: str) -> int:
        """Return when the file system made what is at `path`, in nanoseconds, 0 where it does not say."""

    def list(self, path: str) -> list[DirectoryEntry]:
        """Return the entries of a directory as its server has them now, in no order."""

    def refresh(self, path: str) -> None:
        """Make the next opens below this directory see what other hosts have closed (close-to-open)."""

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        """Write `data` durably to a temporary file, then rename it over `path`.

        Nobody of syncd makes a directory where a file belongs. One that is there may be somebody's: it is moved
        beside it, to a name that ends in `.aside`, and stays.

        Args:
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


_HEAD = 200  # bytes of a name that its temporary one begins with: names have 255


def temporary_name(name: str) -> str:
    """Return a name no one else uses for the file that will become `name`, however long that is."""
    head = (
        name
        if len(name.encode(errors="replace")) <= _HEAD
        else name.encode(errors="replace")[:_HEAD].decode(errors="ignore")
    )
    return f".{head}.{uuid.uuid4().hex[:12]}.tmp"


def is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def exists(disk: Disk, path: str) -> bool:
    """Return whether there is anything at `path`. Not for polling: networks cache absence."""
    try:
        disk.stat(path)
    except MISSING:
        return False
    return True


def is_directory(disk: Disk, path: str) -> bool:
    """Return whether there is a directory at `path`, and no link to one."""
    try:
        return disk.stat(path).kind == "directory"
    except MISSING:
        return False


def is_below(path: str, root: str) -> bool:
    """Return whether an absolute path is `root` or lies inside it."""
    return path == root or path.startswith(f"{root.rstrip('/')}/")


def list_if_there(disk: Disk, path: str) -> list[DirectoryEntry]:
    """Return the entries of a directory, none when it is missing."""
    try:
        return disk.list(path)
    except MISSING:
        return []


_DEEPEST = 64


def tree_stats(disk: Disk, path: str) -> Iterator[FileStat]:
    """Yield the stat of everything below a directory, following no link.

    Left out is what this user may not look at, what lies more than `_DEEPEST` levels below (no step has so many), and
    what has a longer path than the system takes.
    """
    waiting = [(path, entry, 1) for entry in list_if_there(disk, path)]
    while waiting:
        directory, entry, level = waiting.pop()
        child = f"{directory}/{entry.name}"
        try:
            yield disk.stat(child)
            if entry.kind == "directory" and level < _DEEPEST:
                waiting += [(child, below, level + 1) for below in list_if_there(disk, child)]
        except (*MISSING, PermissionError):
            continue
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise


def remove_tree(disk: Disk, path: str, kind: Kind = "directory") -> int:
    """Remove whatever is at `path`, following no link, and return the number of files removed.

    What vanishes meanwhile is fine; what cannot be removed yet (a file that a reader on this host holds open stays as
    `.nfs*` until it is closed) raises, and a later call resumes from there. However deep the tree is, no path becomes
    longer than the system takes: a directory `_LEVELS` below is moved up before it is emptied. `kind` is what a
    listing says is there; a directory is looked at once more.
    """
    removed, waiting = 0, [_Doomed(path, kind, 0)]
    while waiting:
        doomed = waiting.pop()
        with contextlib.suppress(FileNotFoundError):
            if doomed.is_emptied:
                disk.remove_directory(doomed.path)
            elif doomed.kind != "directory" or _is_no_directory(disk, doomed.path):
                disk.unlink(doomed.path)
                removed += 1
            elif doomed.level > _LEVELS:
                higher = f"{path}/{temporary_name('deep')}"
                disk.rename(doomed.path, higher)
                waiting.append(_Doomed(higher, "directory", 1))
            else:
                waiting.append(doomed._replace(is_emptied=True))
                waiting += [
                    _Doomed(f"{doomed.path}/{entry.name}", entry.kind, doomed.level + 1)
                    for entry in list_if_there(disk, doomed.path)
                ]
    return removed


_LEVELS = 8


class _Doomed(NamedTuple):
    """Something that is to be removed, by levels below the top; a directory again once all in it was."""

    path: str
    kind: Kind
    level: int
    is_emptied: bool = False


def _is_no_directory(disk: Disk, path: str) -> bool:
    # A listing would follow a link; absence, which may be a cached one, is left for the listing to find.
    try:
        return disk.stat(path).kind != "directory"
    except MISSING:
        return False
