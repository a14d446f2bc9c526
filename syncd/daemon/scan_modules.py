"""Scans who takes part in a job, and what protects its steps: presences of explorers and trainers, and pins."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.obstacle import required_obstacle
from syncd.protocol.presence import Liveness, Presence, Presences
from syncd.protocol.request import read_pins
from syncd.protocol.version import BELIEVED_GENERATION, Pair

T = TypeVar("T")

MODULES_EVERY = 5.0
"""Seconds between two readings of the presences; each removal reads them again all the same."""

MODULES_SHARE = 20
"""The next reading of the presences waits this many times as long as the last one took, up to a quarter of the time
after which a module counts as dead."""


class ModuleScanner:
    """Reads presences and pins again and again.

    Args:
        job: The job.
        clock: This host's clock.
        presences: Reads the presences, and caches those that have not changed.
        ttl: Seconds without a heartbeat after which a module counts as dead.
    """

    def __init__(self, job: Job, clock: Clock, presences: Presences, ttl: float) -> None:
        self._job, self._clock, self._presences, self._ttl = job, clock, presences, ttl
        self._explorers, self._trainers = Liveness(ttl), Liveness(ttl)
        self._read_at, self._took = float("-inf"), 0.0
        self.applied: Pair | None = None
        """The highest pair that an explorer has applied."""

    def is_due(self, now: float) -> bool:
        """Return whether to read again: reading thousands of presences takes long, so it then happens less often."""
        return now - self._read_at >= max(MODULES_EVERY, min(MODULES_SHARE * self._took, self._ttl / 4))

    def scan(self, before: Snapshot) -> Snapshot:
        """Return a snapshot with the modules and pins of now. What cannot be listed now stays as it was."""
        self._read_at = self._clock.monotonic()
        unlisted: list[str] = []
        unreadable: dict[str, str] = {}
        explorers = read_or_note(unlisted, self._job.explorers, self._read_presences)
        trainers = read_or_note(unlisted, self._job.trainers, self._read_presences)
        # The time after the reading: a heartbeat counts from when it can have been seen, not from before a stall.
        seen_at = self._clock.monotonic()
        self._took = seen_at - self._read_at
        pins = read_or_note(unlisted, self._job.pins, lambda _: read_pins(self._job, unreadable))
        found = replace(
            before,
            explorers=before.explorers
            if explorers is None
            else _modules(explorers, self._explorers, seen_at),
            trainers=before.trainers if trainers is None else _modules(trainers, self._trainers, seen_at),
            pins=before.pins if pins is None else pins,
            unlisted=tuple(unlisted),
            unreadable_pins=unreadable,
        )
        self.applied = _highest_applied(found)
        return found

    def _read_presences(self, directory: str) -> dict[str, Presence]:
        readable, unreadable = self._presences.read(directory)
        return readable | unreadable


def read_or_note(unlisted: list[str], directory: str, read: Callable[[str], T]) -> T | None:
    """Return what `read` returns of a directory; note one that cannot be listed, and return None.

    Raises:
        OSError: The whole file system fails.
    """
    try:
        return read(directory)
    except OSError as error:
        unlisted.append(str(required_obstacle(error, directory)))
        return None


def _highest_applied(snapshot: Snapshot) -> Pair | None:
    applied = (module.presence.applied for module in snapshot.explorers.values())
    believed = (pair for pair in applied if pair is not None and pair[0] <= BELIEVED_GENERATION)
    return max(believed, default=None)


def _modules(presences: dict[str, Presence], liveness: Liveness, now: float) -> dict[str, Module]:
    liveness.observe(
        now, [(name, (presence.incarnation, presence.beat)) for name, presence in presences.items()]
    )
    return {
        name: Module(presence, liveness.is_alive(name, now), liveness.silent_for(name, now))
        for name, presence in presences.items()
    }
