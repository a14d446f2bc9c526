"""Who else is in the job: the presences of its trainers and explorers, and which of them are alive.

A peer is alive if its presence has changed within `ttl` seconds of this host's clock. A process of this host that
has ended is noticed at once.
"""

import threading
from dataclasses import replace

from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.documents import record_in
from syncd.protocol.layout import Job
from syncd.protocol.presence import TTL, Liveness, Presence, RunningStatus, read_presences
from syncd.protocol.process import Process


class Peers:
    """The trainers, or the explorers, of a job. Several threads may use it."""

    def __init__(self, job: Job, directory: str, clock: Clock, ttl: float = TTL) -> None:
        self._disk, self._directory, self._clock = job.disk, directory, clock
        self._lock = threading.Lock()
        self._liveness = Liveness(ttl)
        self._over_at_first: dict[str, str] | None = None
        self._presences: dict[str, Presence] = {}
        self._unreadable: dict[str, Presence] = {}
        self._ended: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()

    def read(self) -> dict[str, Presence]:
        """Read and return the presences by identity; dead peers count as stopped."""
        presences, unreadable = self._read()
        with self._lock:
            self._unreadable = unreadable
            now = self._clock.monotonic()
            self._liveness.observe(
                now, [(name, (presence.incarnation, presence.beat)) for name, presence in presences.items()]
            )
            self._presences = presences
            self._ended = frozenset(name for name, presence in presences.items() if has_ended(presence))
            self._silent = frozenset(name for name in presences if not self._liveness.is_alive(name, now))
            if self._over_at_first is None:
                self._over_at_first = {
                    name: presence.incarnation
                    for name, presence in presences.items()
                    if presence.status is RunningStatus.STOPPED or name in self._ended
                }
            dead = self._ended | self._silent
            return {
                name: replace(presence, status=RunningStatus.STOPPED) if name in dead else presence
                for name, presence in presences.items()
            }

    def living(self) -> dict[str, Presence]:
        """Read the presences and return those of the peers that have neither stopped nor died."""
        return {
            name: presence
            for name, presence in self.read().items()
            if presence.status is not RunningStatus.STOPPED
        }

    def counts(self) -> dict[RunningStatus, int]:
        statuses = [presence.status for presence in self.read().values()]
        return {status: statuses.count(status) for status in RunningStatus}

    def last(self) -> dict[str, Presence]:
        """Return the presences that the last read found, as they were written."""
        with self._lock:
            return self._presences

    def unreadable(self) -> dict[str, str]:
        """Return, by identity, why the last read could not read the files of some peers, alive or not."""
        with self._lock:
            return {name: presence.problem for name, presence in self._unreadable.items()}

    def departed(self) -> list[Presence] | None:
        """Return the peers seen here if all of them had stopped or died by the last read, else None.

        A peer that had stopped before the first read belongs to an earlier run: its successor is waited for. The
        same holds for one that was killed before, until it has been silent for `ttl` seconds here.
        """
        with self._lock:
            dead = self._ended | self._silent
            if any(
                name not in dead and presence.status is not RunningStatus.STOPPED
                for name, presence in self._presences.items()
            ):
                return None
            return [
                presence for name, presence in self._presences.items() if self._has_departed(name, presence)
            ] or None

    def _has_departed(self, name: str, presence: Presence) -> bool:
        if self._over_at_first is None or self._over_at_first.get(name) != presence.incarnation:
            return True
        return presence.status is not RunningStatus.STOPPED and name in self._silent

    def _read(self) -> tuple[dict[str, Presence], dict[str, Presence]]:
        try:
            self._disk.refresh(self._directory)
        except MISSING:
            return {}, {}
        return read_presences(self._disk, self._directory)


def process_of(presence: Presence) -> Process | None:
    """Return the process that a presence names, None if it names none."""
    return record_in(Process, presence.info, "process")


def has_ended(presence: Presence) -> bool:
    """Return whether the process of a presence has certainly ended."""
    process = process_of(presence)
    return process is not None and process.is_gone()


def is_here(presence: Presence) -> bool:
    """Return whether the process of a presence is on this host and has not ended; it may be stopped."""
    process = process_of(presence)
    return process is not None and process.is_here()
