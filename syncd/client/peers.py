"""Who else is there: the presences of a job's trainers and explorers, and which of them live.

Alive is who has been seen to change within `ttl` seconds of this host's clock. A process of this very host
that has ended is noticed at once.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.layout import Job
from syncd.protocol.presence import TTL, Liveness, Presence, RunningStatus, read_presences
from syncd.protocol.process import Process


class Roster:
    """Looks at one kind of module of a job. Used by several threads.

    Args:
        job: The job.
        directory: Where the presences of the kind are.
        clock: This host's clock.
        ttl: Seconds of silence after which a module counts as dead.
    """

    def __init__(self, job: Job, directory: str, clock: Clock, ttl: float = TTL) -> None:
        self._disk, self._directory, self._clock = job.disk, directory, clock
        self._lock = threading.Lock()
        self._liveness = Liveness(ttl)
        self._before: dict[str, str] | None = None
        self._found: dict[str, Presence] = {}
        self._lost: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()

    def look(self) -> dict[str, Presence]:
        """Read the presences anew; the dead ones count as stopped."""
        found = self._read()
        with self._lock:
            now = self._clock.monotonic()
            self._liveness.observe(now, [(name, (one.incarnation, one.beat)) for name, one in found.items()])
            self._found = found
            self._lost = frozenset(name for name, one in found.items() if is_lost(one))
            self._silent = frozenset(name for name in found if not self._liveness.is_alive(name, now))
            if self._before is None:
                self._before = {
                    name: one.incarnation for name, one in found.items() if self._is_over(name, one)
                }
            return {name: self._effective(name, one) for name, one in found.items()}

    def living(self) -> dict[str, Presence]:
        """Read the presences anew and return those that have neither stopped nor died."""
        return {name: one for name, one in self.look().items() if one.status is not RunningStatus.STOPPED}

    def last(self) -> dict[str, Presence]:
        """Return what the last look found, as it was written."""
        with self._lock:
            return self._found

    def departed(self) -> list[Presence] | None:
        """Return those that were seen here and had all left or died by the last look; None while any is left.

        Who had stopped before this observer came belongs to an earlier run: its successor is waited for. The
        same goes for one that was killed before, until its silence has lasted long enough here.
        """
        with self._lock:
            gone = self._lost | self._silent
            if any(
                name not in gone and one.status is not RunningStatus.STOPPED
                for name, one in self._found.items()
            ):
                return None
            return [one for name, one in self._found.items() if self._has_departed(name, one)] or None

    def _has_departed(self, name: str, one: Presence) -> bool:
        if self._before is None or self._before.get(name) != one.incarnation:
            return True
        return one.status is not RunningStatus.STOPPED and name in self._silent

    def _is_over(self, name: str, one: Presence) -> bool:
        return one.status is RunningStatus.STOPPED or name in self._lost

    def _effective(self, name: str, one: Presence) -> Presence:
        dead = name in self._lost or name in self._silent
        return replace(one, status=RunningStatus.STOPPED) if dead else one

    def _read(self) -> dict[str, Presence]:
        try:
            self._disk.refresh(self._directory)
        except MISSING:
            return {}
        return read_presences(self._disk, self._directory)[0]


def process_of(presence: Presence) -> Process | None:
    """Return the process that a presence names, None where it names none."""
    found = presence.info.get("process")
    if not isinstance(found, Mapping):
        return None
    boot, namespace = found.get("boot"), found.get("namespace")
    pid, started = found.get("pid"), found.get("started")
    if type(pid) is int and type(started) is int and isinstance(boot, str) and isinstance(namespace, str):
        return Process(boot, namespace, pid, started)
    return None


def is_lost(presence: Presence) -> bool:
    """Say whether the process of a presence has certainly ended."""
    process = process_of(presence)
    return process is not None and process.is_gone()


def is_here(presence: Presence) -> bool:
    """Say whether the process of a presence certainly lives, on this host."""
    process = process_of(presence)
    if process is None or not process.boot:
        return False
    here = Process.current()
    return (process.boot, process.namespace) == (here.boot, here.namespace) and not process.is_gone()
