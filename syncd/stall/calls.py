"""The calls to the file system that have not returned, noted beforehand so that another thread can report them."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from syncd.protocol.disk import Clock, Data, Disk
from syncd.protocol.layout import Job
from syncd.protocol.mount import MountState, mount_trouble

STUCK_AFTER = 10.0
"""Seconds after which a call counts as stuck: longer than any call takes on a mount that works."""

SLOWEST = 16 << 20
"""The lowest rate, in bytes a second, at which a sync makes data durable: a large sync is slow, not stuck."""

CHANGING = frozenset({"write", "sync", "rename", "mkdir", "rmdir", "unlink", "chmod"})

MOUNT_HINT = "findmnt; dmesg | tail  # is its server up?"
"""What to run when a call does not return; neither command asks the mount."""

TrackCall = Callable[[str, str], AbstractContextManager[None]]
"""Notes a call, by what it does and its path, while it is made."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DiskCall:
    """One call that has not returned."""

    what: str  # what it does: the name of the method of `Disk`
    path: str
    since: float  # when it was made, on the clock of `PendingCalls`
    allowance: float = 0.0  # seconds that it may take beyond what others may

    def __str__(self) -> str:
        return f"{self.what} {self.path}"


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call that has not returned for longer than a working mount would take."""

    call: DiskCall
    seconds: float  # for how long it has run

    def __str__(self) -> str:
        return f"{self.call} has not returned for {self.seconds:.0f} s"

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event that says so."""
        trouble = mount_trouble(MountState.STUCK, self.call.path, str(self))
        return {"state": trouble.state, "detail": trouble.message, "hint": trouble.hint}


class PendingCalls:
    """The calls that have not returned, at most one for each thread, and whether one that changes something began."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[int, DiskCall] = {}
        self._cancellation: BaseException | None = None
        self._cancelled = set[int]()
        self.may_have_changed = False

    @contextmanager
    def __call__(self, what: str, path: str) -> Iterator[None]:
        """Note a call of this thread until it returns."""
        outer = self.begin(what, path)
        try:
            yield
        finally:
            self.end(outer)

    def begin(self, what: str, path: str) -> DiskCall | None:
        """Note a call of this thread, and return the call that it is a part of."""
        outer = self._calls.get(threading.get_ident())
        self.renew(what, path)
        return outer

    def renew(self, what: str, path: str, allowance: float = 0.0) -> None:
        """Note the next part of a call in place of the previous one: the call makes progress."""
        thread = threading.get_ident()
        if self._cancellation is not None and thread not in self._cancelled:
            self._cancelled.add(thread)
            raise self._cancellation
        self.may_have_changed = self.may_have_changed or what in CHANGING
        self._calls[thread] = DiskCall(what, path, self._clock.monotonic(), allowance)

    def end(self, outer: DiskCall | None) -> None:
        if outer is None:
            self._calls.pop(threading.get_ident(), None)
        else:
            self._calls[threading.get_ident()] = outer

    def cancel(self, error: BaseException) -> None:
        """Raise an error at the next call of each thread, once: what cleans up after it may call the disk again."""
        self._cancellation = error

    def oldest(self, thread: int | None = None) -> DiskCall | None:
        """Return the call that has been pending for longest, of one thread or of all; None without one."""
        calls = dict(self._calls)  # one step of the interpreter: other threads note theirs meanwhile
        mine = calls.values() if thread is None else [calls[thread]] if thread in calls else []
        return min(mine, key=lambda call: call.since, default=None)

    def age(self, call: DiskCall) -> float:
        return self._clock.monotonic() - call.since

    def stuck(self, limit: float = STUCK_AFTER) -> StuckCall | None:
        """Return the oldest call if it has taken so many seconds beyond what it may."""
        call = self.oldest()
        if call is None or self.age(call) - call.allowance < limit:
            return None
        return StuckCall(call, self.age(call))


def untracked(_what: str, _path: str) -> AbstractContextManager[None]:
    return nullcontext()


def _noting(
    what: str, method: Callable[Concatenate[Disk, P], T]
) -> Callable[Concatenate["TrackedDisk", P], T]:
    """Return a method of `Disk`, whose first argument is a path, that notes its call while it is made."""

    @functools.wraps(method)
    def call(self: "TrackedDisk", /, *args: P.args, **kwargs: P.kwargs) -> T:
        outer = self.calls.begin(what, str(args[0]))
        try:
            result: T = getattr(self.disk, method.__name__)(*args, **kwargs)
            return result
        finally:
            self.calls.end(outer)

    return call


class TrackedDisk:
    def __init__(self, disk: Disk, calls: PendingCalls) -> None:
        self.disk, self.calls = disk, calls

    read = _noting("read", Disk.read)
    read_at = _noting("read", Disk.read_at)
    stat = _noting("stat", Disk.stat)
    born = _noting("stat", Disk.born)
    list = _noting("list", Disk.list)
    refresh = _noting("open", Disk.refresh)
    rename = _noting("rename", Disk.rename)
    make_directory = _noting("mkdir", Disk.make_directory)
    remove_directory = _noting("rmdir", Disk.remove_directory)
    unlink = _noting("unlink", Disk.unlink)
    sync_directory = _noting("sync", Disk.sync_directory)
    adopt = _noting("chmod", Disk.adopt)
    free = _noting("statfs", Disk.free)
    inodes = _noting("statfs", Disk.inodes)

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        noted = data if isinstance(data, bytes) else self._noted(path, data)
        with self.calls("write", path):
            self.disk.replace(path, noted, via=via, private=private)

    def _noted(self, path: str, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Note each piece by itself: a large file takes long, and the sync at its end does too."""
        size = 0
        for piece in pieces:
            self.calls.renew("write", path)
            size += memoryview(piece).nbytes
            yield piece
        self.calls.renew("write", path, size / SLOWEST)


def tracked(job: Job, calls: PendingCalls) -> Job:
    """Return a job that notes its calls while they are made."""
    return Job(job.root, job.state, TrackedDisk(job.disk, calls))
