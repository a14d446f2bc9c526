"""This process as a member of a job: the one writer of its presence file, and the thread that keeps it alive.

What the file should say is kept here and written as a whole, so the next write makes good one that failed.
"""

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from syncd.client.peers import is_here, is_lost
from syncd.client.wait import Pace, Wait
from syncd.errors import CorruptDataError, ProtocolTooNewError, SyncdError, UsageError, storage_error
from syncd.protocol.disk import MISSING, Clock, Disk
from syncd.protocol.layout import check_identity
from syncd.protocol.presence import HEARTBEAT, Presence, Publisher, RunningStatus, path_of, read_presence
from syncd.protocol.process import Process
from syncd.protocol.version import Pair

CLAIM = 3 * HEARTBEAT
"""Seconds for which another host's claim on an identity is watched before it counts as left behind."""

_PUBLISHED = ("status", "applied", "applied_digest", "loading", "leases", "asked", "answered", "step", "info")


class Member:
    """The presence of this process.

    Args:
        disk: The file system.
        clock: This host's clock.
        directory: Where the presences of its kind are.
        identity: Its name.
        asked: The number that its asks continue from.
    """

    def __init__(self, disk: Disk, clock: Clock, directory: str, identity: str, asked: int = 0) -> None:
        info = {"process": asdict(Process.current())}
        self._wanted = Presence(identity, incarnation=uuid.uuid4().hex, asked=asked, info=info)
        self._publisher = Publisher(disk, clock, directory, self._wanted)
        self._disk, self._clock, self.identity = disk, clock, identity
        self._path = path_of(directory, identity)
        self._lock = threading.RLock()
        self._base = RunningStatus.RUNNING
        self._asks = 0
        self._leases: Counter[int] = Counter()
        self._error: SyncdError | None = None
        self._dirty, self._lost, self.closed = True, False, False
        self._written = clock.monotonic()

    @property
    def presence(self) -> Presence:
        """Return what this member says of itself."""
        with self._lock:
            return self._wanted

    def join(self) -> None:
        """Publish this member for the first time."""
        self._publisher.prepare()
        self.change()

    def check(self) -> None:
        """Raise what has gone wrong since the last call, once.

        Raises:
            UsageError: It is closed, or another process has taken its identity.
            SyncdError: A heartbeat could not be published.
        """
        with self._lock:
            if self.closed:
                raise UsageError(f"{self._wanted.identity} is closed", path=self._path)
            error = self._error
            if not self._lost:
                self._error = None
        if error is not None:
            raise error

    def change(self, **changes: Any) -> Presence:
        """Change fields and publish them; what cannot be written now goes out with a later heartbeat."""
        with self._lock:
            self._wanted = replace(self._wanted, **changes, status=self._status())
            self._write()
            return self._wanted

    def note(self, **changes: Any) -> None:
        """Change fields that go out with the next write, a heartbeat's at the latest."""
        with self._lock:
            self._wanted = replace(self._wanted, **changes)
            self._dirty = True

    def set_status(self, status: RunningStatus, old: RunningStatus | None = None, **changes: Any) -> None:
        """Change the status, and other fields in the same write.

        Raises:
            UsageError: It is not `old` now, or would not change.
        """
        with self._lock:
            if old is not None and (old is not self._base or old is status):
                raise UsageError(
                    f"status is {self._base.value}: no change from {old.value} to {status.value}"
                )
            asks = status is RunningStatus.REQUIRE_SYNC and self._base is not status
            self._base = status
            self.change(asked=self._wanted.asked + asks, **changes)

    @contextlib.contextmanager
    def asking(self) -> Iterator[int]:
        """Ask for a sync; on the way out, whatever the way, the status is what it was before."""
        with self._lock:
            self._asks += 1
        try:
            yield self.change(asked=self._wanted.asked + 1).asked
        finally:
            with self._lock:
                self._asks -= 1
                self.settle()

    @contextlib.contextmanager
    def leasing(self, pair: Pair) -> Iterator[None]:
        """Publish a lease on a step, and give it back on the way out."""
        with self._lock:
            self._leases[pair[1]] += 1
        try:
            with self._lock:
                self.change(leases=tuple(sorted(self._leases)), loading=pair)
            yield
        finally:
            with self._lock:
                self._leases -= Counter([pair[1]])
                loading = self._wanted.loading
                self.settle(leases=tuple(sorted(self._leases)), loading=None if loading == pair else loading)

    def settle(self, **changes: Any) -> None:
        """Change fields where nothing may fail; a write that does is tried again by the heartbeat."""
        with self._lock:
            if not self.closed:
                self.attempt(lambda: self.change(**changes))

    def attempt(self, work: Callable[[], object]) -> None:
        """Do something in the background; what goes wrong is raised by `check`."""
        try:
            work()
        except SyncdError as error:
            self._error = error
        except OSError as error:
            self._error = storage_error(error, self._path)
        except Exception as error:  # noqa: BLE001 - the heartbeat must outlive any bug, and the bug be seen
            self._error = SyncdError(f"the heartbeat failed: {error!r}", path=self._path)

    def beat(self) -> None:
        """Publish a heartbeat if one is due. Never raises: `check` does."""
        with self._lock:
            if self.closed or self._lost:
                return
            if self._dirty or self._clock.monotonic() - self._written >= HEARTBEAT:
                self.attempt(self._beat)

    def close(self, **last: Any) -> None:
        """Publish that this member has stopped; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed, self._base, self._asks = True, RunningStatus.STOPPED, 0
            self._leases.clear()
            if not self._lost:
                self.change(**last, leases=(), loading=None)

    def _status(self) -> RunningStatus:
        asking = self._asks > 0 and self._base is RunningStatus.RUNNING
        return RunningStatus.REQUIRE_SYNC if asking else self._base

    def _write(self) -> None:
        self._dirty = True
        try:
            self._publisher.update(**{name: getattr(self._wanted, name) for name in _PUBLISHED})
        except OSError as error:
            raise storage_error(error, self._path) from error
        self._dirty, self._written = False, self._clock.monotonic()
        if not self._lost:
            self._error = None

    def _beat(self) -> None:
        try:
            theirs = read_presence(self._disk, self._path).incarnation
        except ProtocolTooNewError:
            raise
        except (*MISSING, CorruptDataError):
            theirs = self._wanted.incarnation
        if theirs != self._wanted.incarnation:
            self._lost = True
            raise held(self._wanted.identity, self._path)
        self._write()


class Heartbeat:
    """A thread that beats until it is stopped.

    Args:
        beat: What to do; must not raise.
        every: Seconds between two beats.
    """

    def __init__(self, beat: Callable[[], None], every: float) -> None:
        self._beat, self._every = beat, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncd-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a beat that is under way."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(HEARTBEAT)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._beat()


def held(identity: str, path: str) -> UsageError:
    """Return the error for an identity that another process holds."""
    return UsageError(
        f"{identity!r} is held by another process that lives",
        path=path,
        hint="stop that process, or give this one a name of its own if both are to take part",
    )


def claim(disk: Disk, clock: Clock, directory: str, identity: str, pace: Pace) -> Wait[Presence | None]:
    """Return what an earlier process of this identity has left, None if there was none.

    Whether a process of this host lives is known at once; one of another host is watched for a few
    heartbeats.

    Raises:
        UsageError: The identity is held by a process that lives, or is not one.
    """
    path = path_of(directory, check_identity(identity))
    before = now = left_by(disk, directory, identity)
    end = clock.monotonic() + CLAIM
    while now is not None and now.status is not RunningStatus.STOPPED and not is_lost(now):
        if is_here(now) or before is None or (now.incarnation, now.beat) != (before.incarnation, before.beat):
            raise held(identity, path)
        if clock.monotonic() >= end:
            break
        yield pace.next()
        disk.refresh(directory)
        now = left_by(disk, directory, identity)
    return now or before


def left_by(disk: Disk, directory: str, identity: str) -> Presence | None:
    """Return the presence of an identity, None where there is none that can be read."""
    try:
        return read_presence(disk, path_of(directory, identity))
    except ProtocolTooNewError:
        raise
    except (*MISSING, CorruptDataError):
        return None
