"""What this process asks of the file system right now, so that another thread can say what does not come back.

A call to a dead server stands in the kernel for as long as the server is away: the thread that made it can say
nothing any more, not even that a signal came. Calls are therefore noted before they are made.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from syncd.protocol.disk import DOCUMENT_LIMIT, Clock, Data, DirectoryEntry, Disk, FileStat
from syncd.protocol.layout import Job

STUCK_AFTER = 10.0
"""Seconds after which a call that has not come back is said to be stuck: slower than any mount that works."""

SLOWEST = 16 << 20
"""Bytes a second at which what was written becomes durable at least: a sync of many takes long, and is not stuck."""

CHANGING = frozenset({"write", "sync", "rename", "mkdir", "rmdir", "unlink", "chmod"})
"""The calls after which something may be otherwise than before."""

IS_IT_UP = "findmnt; dmesg | tail  # is its server up?"
"""What to do about a call that does not come back, without asking the mount itself."""

Attend = Callable[[str, str], AbstractContextManager[None]]
"""Notes a call, by what it does and the path, while it is made."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that has not come back.

    Args:
        what: What it does: the name of the method of `Disk`.
        path: To which path.
        since: When it was made, on the clock of `InHand`.
        allowance: Seconds that it may take beyond what others may.
    """

    what: str
    path: str
    since: float
    allowance: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.path}"


class InHand:
    """The calls in hand, one a thread at most.

    Args:
        clock: This host's clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[int, Call] = {}

    @contextmanager
    def __call__(self, what: str, path: str) -> Iterator[None]:
        """Note a call of this thread until it has come back."""
        within = self.begin(what, path)
        try:
            yield
        finally:
            self.end(within)

    def begin(self, what: str, path: str) -> Call | None:
        """Note a call of this thread, and return the one that it is a part of."""
        within = self._calls.get(threading.get_ident())
        self.renew(what, path)
        return within

    def renew(self, what: str, path: str, allowance: float = 0.0) -> None:
        """Note a further part of a call in the place of the one before: there was progress."""
        self._put(Call(what, path, self._clock.monotonic(), allowance))

    def end(self, within: Call | None) -> None:
        """Take note that it has come back."""
        self._put(within)

    def oldest(self, thread: int | None = None) -> Call | None:
        """Return the call that has been in hand for longest, of one thread or of all; None without one."""
        calls = dict(self._calls)  # one step of the interpreter: other threads note theirs meanwhile
        mine = calls.values() if thread is None else [calls[thread]] if thread in calls else []
        return min(mine, key=lambda call: call.since, default=None)

    def age(self, call: Call) -> float:
        """Return for how many seconds a call has been in hand."""
        return self._clock.monotonic() - call.since

    def _put(self, call: Call | None) -> None:
        if call is None:
            self._calls.pop(threading.get_ident(), None)
        else:
            self._calls[threading.get_ident()] = call


def unattended(_what: str, _path: str) -> AbstractContextManager[None]:
    """Note nothing."""
    return nullcontext()


class AttendedDisk:
    """A disk whose calls are noted while they are made.

    Args:
        disk: The disk.
        in_hand: Where they are noted.
    """

    def __init__(self, disk: Disk, in_hand: InHand) -> None:
        self._disk, self._in_hand = disk, in_hand

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        return self._attend("read", path, lambda: self._disk.read(path, limit))

    def read_at(self, path: str, offset: int, length: int) -> bytes:
        return self._attend("read", path, lambda: self._disk.read_at(path, offset, length))

    def stat(self, path: str) -> FileStat:
        return self._attend("stat", path, lambda: self._disk.stat(path))

    def born(self, path: str) -> int:
        return self._attend("stat", path, lambda: self._disk.born(path))

    def list(self, path: str) -> list[DirectoryEntry]:
        return self._attend("list", path, lambda: self._disk.list(path))

    def refresh(self, path: str) -> None:
        self._attend("open", path, lambda: self._disk.refresh(path))

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        noted = data if isinstance(data, bytes) else self._noted(path, data)
        self._attend("write", path, lambda: self._disk.replace(path, noted, via=via, private=private))

    def rename(self, source: str, target: str) -> None:
        self._attend("rename", source, lambda: self._disk.rename(source, target))

    def make_directory(self, path: str) -> None:
        self._attend("mkdir", path, lambda: self._disk.make_directory(path))

    def remove_directory(self, path: str) -> None:
        self._attend("rmdir", path, lambda: self._disk.remove_directory(path))

    def unlink(self, path: str) -> None:
        self._attend("unlink", path, lambda: self._disk.unlink(path))

    def sync_directory(self, path: str) -> None:
        self._attend("sync", path, lambda: self._disk.sync_directory(path))

    def adopt(self, path: str) -> None:
        self._attend("chmod", path, lambda: self._disk.adopt(path))

    def free(self, path: str) -> int:
        return self._attend("statfs", path, lambda: self._disk.free(path))

    def inodes(self, path: str) -> int | None:
        return self._attend("statfs", path, lambda: self._disk.inodes(path))

    def _noted(self, path: str, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Note each piece by itself: a large file takes long, and so does the sync at its end."""
        size = 0
        for piece in pieces:
            self._in_hand.renew("write", path)
            size += memoryview(piece).nbytes
            yield piece
        self._in_hand.renew("write", path, size / SLOWEST)

    def _attend(self, what: str, path: str, call: Callable[[], T]) -> T:
        within = self._in_hand.begin(what, path)
        try:
            return call()
        finally:
            self._in_hand.end(within)


def attended(job: Job, in_hand: InHand) -> Job:
    """Return a job whose calls are noted while they are made."""
    return Job(job.root, job.state, AttendedDisk(job.disk, in_hand))
