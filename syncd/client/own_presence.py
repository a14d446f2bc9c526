"""This process's presence in a job: the one writer of its file.

The fields are kept here and written together, so the next write repairs one that failed.
"""

import contextlib
import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from syncd.client.peers import has_ended
from syncd.client.wait import Poller
from syncd.errors import (
    TROUBLESHOOTING,
    CorruptDataError,
    FencedError,
    ProtocolTooNewError,
    SyncdError,
    UsageError,
    storage_error,
    storage_errors,
)
from syncd.protocol.broadcast_round import agreed_asks
from syncd.protocol.disk import MISSING, Clock, Disk
from syncd.protocol.layout import Job, check_identity
from syncd.protocol.presence import (
    HEARTBEAT,
    Presence,
    Publisher,
    RunningStatus,
    path_of,
    read_presence,
    read_presences,
)
from syncd.protocol.process import Process, host_name
from syncd.protocol.version import Pair

CLAIM = 3 * HEARTBEAT  # seconds for which a presence is watched before its identity counts as free

_PUBLISHED = (
    "status",
    "applied",
    "applied_digest",
    "loading",
    "leases",
    "asked",
    "answered",
    "step",
    "info",
    "reads",
)


class OwnPresence:
    """The presence of this process. Several threads may use it.

    Args:
        asked: The number that its asks continue from.
        status: What it publishes first; `STOPPED` for a process that takes no part in the job and only leases steps.
        fence: A directory through which it is written, removed by whoever takes over; empty for none.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: str,
        identity: str,
        asked: int = 0,
        status: RunningStatus = RunningStatus.RUNNING,
        fence: str = "",
    ) -> None:
        info = {"process": asdict(Process.current())}
        self._wanted = Presence(
            identity,
            status,
            incarnation=uuid.uuid4().hex,
            asked=asked,
            host=host_name(),
            pid=os.getpid(),
            info=info,
        )
        self._publisher = Publisher(disk, clock, directory, self._wanted, fence)
        self._disk, self._clock, self.identity = disk, clock, identity
        self._path = path_of(directory, identity)
        self._lock = threading.RLock()
        self._base = status
        self._asks = 0
        self._leases: Counter[int] = Counter()
        self._error: SyncdError | None = None
        self._dirty, self._lost, self.closed = True, False, False
        self._fence = fence
        self._written = clock.monotonic()

    @property
    def presence(self) -> Presence:
        """Return the fields as the next write publishes them."""
        with self._lock:
            return self._wanted

    @property
    def info(self) -> dict[str, Any]:
        return self.presence.info

    def join(self) -> None:
        """Publish the presence for the first time."""
        self._publisher.prepare()
        self.change()

    def check(self) -> None:
        """Raise a background error once."""
        with self._lock:
            if self.closed:
                raise UsageError(f"{self.identity} is closed", path=self._path)
            error = self._error
            if not self._lost:
                self._error = None
        if error is not None:
            raise error

    def change(self, **changes: Any) -> Presence:
        """Change fields and publish them; a later heartbeat repeats a write that fails."""
        with self._lock:
            self._wanted = replace(self._wanted, **changes, status=self._status())
            self._write()
            return self._wanted

    def change_later(self, **changes: Any) -> None:
        """Change fields; the next write publishes them, at the latest a heartbeat."""
        with self._lock:
            self._wanted = replace(self._wanted, **changes)
            self._dirty = True

    def try_change(self, **changes: Any) -> None:
        """Change fields without raising; a later heartbeat repeats a write that fails."""
        with self._lock:
            if not self.closed:
                self.attempt(lambda: self.change(**changes))

    def set_status(self, status: RunningStatus, old: RunningStatus | None = None, **changes: Any) -> None:
        """Change the status, and other fields in the same write."""
        with self._lock:
            if old is not None and (old is not self._base or old is status):
                wanted = f"no change from {old.value} to {status.value}"
                raise UsageError(f"status is {self._base.value}: {wanted}")
            asks = status is RunningStatus.REQUIRE_SYNC and self._base is not status
            self._base = status
            self.change(asked=self._wanted.asked + asks, **changes)

    @contextlib.contextmanager
    def asking(self) -> Iterator[int]:
        """Ask for a sync; however the block ends, the status is then what it was before."""
        with self._lock:
            self._asks += 1
        try:
            yield self.change(asked=self._wanted.asked + 1).asked
        finally:
            with self._lock:
                self._asks -= 1
                self.try_change()

    @contextlib.contextmanager
    def leasing(
        self, steps: Collection[int], pair: Pair | None = None, *, ends_later: bool = False
    ) -> Iterator[None]:
        """Publish leases on steps, and end them with the block.

        Args:
            pair: The version that is loaded, if the leases are for one that was not published before.
            ends_later: Whether a later write publishes the end, at the latest a heartbeat.
        """
        with self._lock:
            self._leases.update(steps)
        try:
            with self._lock:
                loading = pair or self._wanted.loading
                self.change(leases=tuple(sorted(self._leases)), loading=loading)
            yield
        finally:
            with self._lock:
                self._leases -= Counter(steps)
                loading = None if self._wanted.loading == pair else self._wanted.loading
                end = self.change_later if ends_later else self.try_change
                end(leases=tuple(sorted(self._leases)), loading=loading)

    def attempt(self, work: Callable[[], object]) -> None:
        """Run background work; `check` raises its error."""
        try:
            work()
        except SyncdError as error:
            self._error = error
        except OSError as error:
            self._error = storage_error(error, self._path)
        except Exception as error:  # noqa: BLE001 - the heartbeat must survive any bug, and the user must see it
            self._error = SyncdError(f"the heartbeat failed: {error!r}", path=self._path)

    def beat(self) -> None:
        """Publish a heartbeat if one is due. Never raises: `check` does."""
        with self._lock:
            if self.closed or self._lost:
                return
            if self._dirty or self._clock.monotonic() - self._written >= HEARTBEAT:
                self.attempt(self._beat)

    def close(self, **last: Any) -> None:
        """Publish that this process has stopped; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed, self._base, self._asks = True, RunningStatus.STOPPED, 0
            self._leases.clear()
            if not self._lost and not self._is_taken():
                self.change(**last, leases=(), loading=None)

    def _status(self) -> RunningStatus:
        asking = self._asks > 0 and self._base is RunningStatus.RUNNING
        return RunningStatus.REQUIRE_SYNC if asking else self._base

    def _write(self) -> None:
        if self._clock.monotonic() - self._written >= CLAIM:
            self._check_taken()  # silent for so long, this process may have lost its identity
        self._dirty = True
        with storage_errors(self._path):
            self._publisher.update(**{name: getattr(self._wanted, name) for name in _PUBLISHED})
        self._dirty, self._written = False, self._clock.monotonic()
        if not self._lost:
            self._error = None

    def _beat(self) -> None:
        self._check_taken()
        self._write()

    def _check_taken(self) -> None:
        if self._is_taken():
            self._lost = True
            raise _taken_over(self.identity, self._path) if self._fence else _held(self.identity, self._path)

    def _is_taken(self) -> bool:
        presence = _read(self._disk, self._path)
        return presence is not None and presence.incarnation != self._wanted.incarnation


def join(job: Job, role: str, identity: str | None, poller: Poller, fence: str = "") -> OwnPresence:
    """Claim an identity in a job and return its presence, published."""
    directory = job.trainers if role == "trainer" else job.explorers
    name = check_identity(identity or ("trainer" if role == "trainer" else _default_identity()))
    path = path_of(directory, name)
    before = _claim(job.disk, directory, name, poller)
    own = OwnPresence(job.disk, poller.clock, directory, name, _last_ask(job, name, before), fence=fence)
    own.join()
    try:
        # If two processes claim a free name at once, the one whose file stays has it.
        poller.pause()
        after = _read(job.disk, path)
    except BaseException:
        own.close()
        raise
    if after is not None and after.incarnation != own.presence.incarnation:
        raise _held(name, directory)
    return own


def _claim(disk: Disk, directory: str, identity: str, poller: Poller) -> Presence | None:
    """Return the presence that an earlier process of this identity has left, None if there is none.

    A process that has ended on this host is known at once to be dead; any other is watched until it beats, or for
    `CLAIM` seconds: it may be stopped.
    """
    path = path_of(directory, identity)
    before = now = _read(disk, path)
    end = poller.clock.monotonic() + CLAIM
    while now is not None and now.status is not RunningStatus.STOPPED and not has_ended(now):
        if before is None or (now.incarnation, now.beat) != (before.incarnation, before.beat):
            raise _held(identity, path)
        if poller.clock.monotonic() >= end:
            break
        poller.pause()
        disk.refresh(directory)
        now = _read(disk, path)
    return now or before


def _last_ask(job: Job, name: str, before: Presence | None) -> int:
    """Return the highest ask of this explorer that anybody knows, so that no old answer fits a new ask."""
    trainers = read_presences(job.disk, job.trainers)[0].values()
    answered = [
        max(trainer.answered.get(name, 0), agreed_asks(trainer.info).get(name, 0)) for trainer in trainers
    ]
    return max([before.asked if before else 0, *answered])


def _default_identity() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "_", host_name()).lstrip(".-")[:80]
    return f"{host or 'host'}-{os.getpid()}"


def _read(disk: Disk, path: str) -> Presence | None:
    """Return the presence in a file, None if the file is missing or damaged."""
    try:
        return read_presence(disk, path)
    except ProtocolTooNewError:
        raise
    except (*MISSING, CorruptDataError):
        return None


def _taken_over(identity: str, path: str) -> FencedError:
    return FencedError(
        f"another process has taken over the name {identity!r} while this one was paused", path=path
    )


def _held(identity: str, path: str) -> UsageError:
    return UsageError(
        f"the name {identity!r} is in use by another running process",
        path=path,
        hint=f"stop that process, or give this one another name: {TROUBLESHOOTING}#a-name-is-in-use",
    )
