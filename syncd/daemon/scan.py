"""The scanner: turns the files of a job into a `Snapshot`, reading no more than has to be read.

A scan reads the marker, the version, and the steps that may have changed: new ones, filling ones, the one the marker
names. A reconciliation, each minute and at start, examines every step again and so catches what scans missed.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from syncd.daemon.scan_steps import StepScanner
from syncd.daemon.snapshot import Module, Snapshot
from syncd.errors import (
    CorruptDataError,
    JobMissingError,
    JobReplacedError,
    ProtocolTooNewError,
    storage_errors,
)
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.entry_problem import required_read_problem
from syncd.protocol.layout import Job
from syncd.protocol.presence import TTL, Liveness, Presence, Presences
from syncd.protocol.request import read_pins, read_requests_and_problems
from syncd.protocol.rolling import Wave, read_wave
from syncd.protocol.version import (
    BELIEVED_GENERATION,
    MISSING_MARKER,
    Pair,
    Version,
    read_marker,
    read_version,
)

T = TypeVar("T")

_PROGRESS_EVERY = 1.0

MODULES_EVERY = 5.0
"""Seconds between two readings of the presences; each removal reads them again all the same."""

MODULES_SHARE = 20
"""The next reading of the presences waits this many times as long as the last one took, up to a quarter of the time
after which a module counts as dead."""


class ModuleScanner:
    """Reads presences and pins again and again.

    Args:
        ttl: Seconds without a heartbeat after which a module counts as dead.
    """

    def __init__(self, job: Job, clock: Clock, presences: Presences, ttl: float) -> None:
        self._job, self._clock, self._presences, self._ttl = job, clock, presences, ttl
        self._explorers, self._trainers = Liveness(ttl), Liveness(ttl)
        self._read_at, self._took = float("-inf"), 0.0
        self.every = MODULES_EVERY  # seconds between two readings, where one takes little time
        self.applied: Pair | None = None  # the highest pair that an explorer has applied

    def is_due(self, now: float) -> bool:
        """Return whether to read again: reading thousands of presences takes long, so it then happens less often."""
        return now - self._read_at >= max(self.every, min(MODULES_SHARE * self._took, self._ttl / 4))

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
        snapshot = replace(
            before,
            explorers=_modules(explorers, self._explorers, seen_at, before.explorers),
            trainers=_modules(trainers, self._trainers, seen_at, before.trainers),
            pins=before.pins if pins is None else pins,
            unlisted=tuple(unlisted),
            unreadable_pins=unreadable,
        )
        self.applied = _highest_applied(snapshot)
        return snapshot

    def _read_presences(self, directory: str) -> dict[str, Presence]:
        readable, unreadable = self._presences.read(directory)
        return readable | unreadable


def read_or_note(unlisted: list[str], directory: str, read: Callable[[str], T]) -> T | None:
    """Return what `read` returns of a directory; note one that cannot be listed, and return None."""
    try:
        return read(directory)
    except OSError as error:
        unlisted.append(str(required_read_problem(error, directory)))
        return None


def _highest_applied(snapshot: Snapshot) -> Pair | None:
    applied = (module.presence.applied for module in snapshot.explorers.values())
    believed = (pair for pair in applied if pair is not None and pair[0] <= BELIEVED_GENERATION)
    return max(believed, default=None)


def _modules(
    presences: Mapping[str, Presence] | None, liveness: Liveness, now: float, before: Mapping[str, Module]
) -> Mapping[str, Module]:
    if presences is None:
        return before
    beats = [(name, (presence.incarnation, presence.beat)) for name, presence in presences.items()]
    liveness.observe(now, beats)
    return {
        name: Module(presence, liveness.is_alive(name, now), liveness.silent_for(name, now))
        for name, presence in presences.items()
    }


class Scanner:
    """Scans one job again and again; all durations are on the clock of this host.

    Args:
        ttl: Seconds without a heartbeat after which an explorer or trainer counts as dead.
        progress: Called after each step that was examined, and each second while presences are read: many on a slow
            mount take long.
    """

    def __init__(
        self, job: Job, clock: Clock, ttl: float = TTL, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._clock, self._disk, self._progress = job, clock, job.disk, progress
        self._ttl = ttl
        self.presences = Presences(job.disk, _at_intervals(progress, clock))
        self._root: tuple[int, int] | None = None
        self.reset(None)

    def reset(self, floor: Pair | None) -> None:
        """Forget all but which directory the job is: a new leader gives everybody the whole time to be seen."""
        self.steps = StepScanner(self._job, self._clock, self._progress)
        self._modules = ModuleScanner(self._job, self._clock, self.presences, self._ttl)
        self._snapshot = Snapshot()
        self._marker_since = self._clock.monotonic()
        self.floor = floor

    def note_wave(self, wave: Wave | None, every: float) -> None:
        """Take the wave that the leader has written, and the seconds after which presences are to be read again."""
        self._snapshot = replace(self._snapshot, wave=wave)
        self._modules.every = min(every, MODULES_EVERY)

    def reconcile(self) -> Snapshot:
        began = self._clock.monotonic()
        self.check_root()
        self._read_hints()
        self.steps.scan_all(self._snapshot.version)
        self._read_modules()
        return self._finish(began, free=self._free())

    def scan(self, *, woken: bool = False) -> Snapshot:
        """Examine what may have changed since the last scan; if `woken` by a change of the job directory, list it."""
        began = self._clock.monotonic()
        self._disk.refresh(self._job.root)
        moved = self._read_hints()
        announced = self._snapshot.hint if moved else None
        self.steps.scan(self._snapshot.version, announced, began, listing=woken or moved)
        # Explorers wait for a new step: the next scan reads the presences, of which there may be thousands.
        if self._modules.is_due(began - MODULES_EVERY * moved):
            self._read_modules()
        return self._finish(began, free=self._snapshot.free)

    def check_root(self) -> None:
        """Refuse to take an unmounted or replaced directory for an empty job."""
        root, status = self._job.root, None
        with contextlib.suppress(*MISSING):
            status = self._disk.stat(root)
        if status is None or status.kind != "directory":
            what = "does not exist" if status is None else "is not a directory"
            raise JobMissingError(f"the job directory {what}", path=root, hint=f"ls -ld {root}")
        born = self._disk.born(root)
        if self._root is not None and _is_another((status.inode, born), self._root):
            raise JobReplacedError(
                "another directory is in the place of the job, which may be unmounted",
                path=root,
                hint=f"findmnt -T {root}",
            )
        self._root = status.inode, born

    def _read_hints(self) -> bool:
        """Read marker, tracker and version; return whether the marker has moved."""
        before = self._snapshot
        marker = read_marker(self._disk, self._job.marker)
        moved = marker != before.marker
        if moved:
            self._marker_since = self._clock.monotonic()
        version, problem, is_unread = self._version()
        self._snapshot = replace(
            before, marker=marker, version=version, version_problem=problem, version_unread=is_unread
        )
        # Where there is a marker the tracker only protects, and is read with the presences; else it leads.
        if marker.problem == MISSING_MARKER.problem:
            self._read_tracker()
        return moved

    def _read_tracker(self) -> None:
        tracker = read_marker(self._disk, self._job.tracker)
        step = self._snapshot.tracker if tracker.unreadable else tracker.step
        problem = tracker.problem if tracker.unreadable else ""
        self._snapshot = replace(self._snapshot, tracker=step, tracker_problem=problem)

    def _version(self) -> tuple[Version | None, str, bool]:
        """Return the version, what is wrong with its file, and whether that cannot be read."""
        try:
            return read_version(self._job), "", False
        except ProtocolTooNewError:
            raise
        except CorruptDataError as error:
            return None, error.message, False
        except PermissionError as error:
            return None, str(required_read_problem(error, self._job.version)), True

    def _read_modules(self) -> None:
        self._snapshot = replace(self._modules.scan(self._snapshot), wave=self._wave())
        self._read_tracker()
        self.steps.doubt_unmarked(self._snapshot.tracker)

    def _wave(self) -> Wave | None:
        """Return the wave; a damaged one admits nobody, until the leader writes it anew or removes it."""
        try:
            return read_wave(self._job)
        except ProtocolTooNewError:
            raise
        except CorruptDataError:
            return Wave()
        except PermissionError:
            return None

    def _free(self) -> int | None:
        try:
            return self._disk.free(self._job.root)
        except OSError:
            return None

    def _finish(self, began: float, free: int | None) -> Snapshot:
        """Return what was found by a scan.

        How long something has not changed counts to the beginning of the scan: a daemon may be paused, or a mount
        may stall, after it has looked.
        """
        # Requests are read first: a failure must not lose the changes that `collect` hands over.
        unlisted: list[str] = []
        unreadable: dict[str, str] = {}
        listed = read_or_note(
            unlisted, self._job.requests, lambda _: read_requests_and_problems(self._job, unreadable)
        )
        requests, problems = listed or ((), ())
        steps, rivals = self.steps.collect(began)
        self._snapshot = replace(
            self._snapshot,
            steps=steps,
            rivals=rivals,
            marker_stable_for=max(0.0, began - self._marker_since),
            floor=self._highest(),
            requests=requests,
            entry_problems=(*unlisted, *problems),
            unreadable_requests=unreadable,
            free=free,
        )
        return self._snapshot

    def _highest(self) -> Pair | None:
        """Return the highest pair known: of the version file, of earlier leaders, of what explorers have applied."""
        version = self._snapshot.version
        pairs = (self.floor, version.pair if version else None, self._modules.applied)
        self.floor = max((pair for pair in pairs if pair is not None), default=None)
        return self.floor


def _at_intervals(progress: Callable[[], None], clock: Clock) -> Callable[[], None]:
    """Return a function that calls `progress` once a second at most: its cost grows with the presences, too."""
    called_at = float("-inf")

    def call() -> None:
        nonlocal called_at
        if clock.monotonic() - called_at >= _PROGRESS_EVERY:
            called_at = clock.monotonic()
            progress()

    return call


def _is_another(root: tuple[int, int], known_root: tuple[int, int]) -> bool:
    """Return whether a directory differs from the known one by inode or birth: inode numbers are reused."""
    return root[0] != known_root[0] or (0 not in (root[1], known_root[1]) and root[1] != known_root[1])


def examine_all(job: Job, clock: Clock) -> Snapshot:
    """Scan a job once, as a reader that leads nothing: for views and one-shot commands."""
    with storage_errors(job.root):
        return Scanner(job, clock).reconcile()
