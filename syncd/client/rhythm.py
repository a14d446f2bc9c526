"""How often to look for a version where no event announces it: often while one is near, else at each poll only.

A poll reads files. A look asks the server once whether names in a directory have changed. On a network mount
looks end a pause between two polls early (`VersionLookout`).
"""

import contextlib
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from syncd.protocol.disk import Clock, Disk
from syncd.protocol.layout import Job, parse_attempt_name, parse_step_name
from syncd.protocol.version import Version

QUICK = 0.02  # seconds between two looks while a version is near

FRACTION = 2000
"""Where the last intervals alone say that a version is near, so many looks come in one of them, at most."""

GROWING = 60.0
"""Seconds after which a step that is not published and no longer changes says nothing about when a version comes."""

_REMEMBERED = 9
_EARLY, _LATE = 0.8, 1.25


def look_after(now: float, arrivals: Sequence[float], changed_at: float | None, poll: float) -> float:
    """Return the seconds until the next look.

    A version is near if a step is being written, or has been and is not published; or if the time since the last
    version is about one of the last intervals.

    Args:
        now: The time, in seconds; all times are of one clock.
        arrivals: When the last versions came, oldest first.
        changed_at: When an unpublished step was last seen to change, None without one.
        poll: Seconds between two polls, the longest pause.
    """
    if changed_at is not None and now - changed_at < GROWING:
        return min(QUICK, poll)
    intervals = sorted(later - earlier for earlier, later in pairwise(arrivals))
    if not intervals:
        return poll
    # One early version among many is an exception; a late one may be every tenth, after an evaluation.
    begins = arrivals[-1] + _EARLY * intervals[(len(intervals) - 1) // 4]
    if now < begins:
        return min(begins - now, poll)
    is_due = now <= arrivals[-1] + _LATE * intervals[-1]
    return min(max(QUICK, median(intervals) / FRACTION), poll) if is_due else poll


@dataclass(slots=True)
class Rhythm:
    """What one process has seen of when versions come."""

    _arrivals: list[float] = field(default_factory=list)
    _unpublished: frozenset[Hashable] = frozenset()
    _changed_at: float | None = None

    def note_version(self, now: float) -> None:
        self._arrivals = [*self._arrivals, now][-_REMEMBERED:]

    def note_unpublished(self, now: float, steps: Collection[Hashable]) -> None:
        """Note what is there of steps that are not published: what grows is seen as another value."""
        unpublished = frozenset(steps)
        if not unpublished:
            self._changed_at = None
        elif not unpublished <= self._unpublished:
            self._changed_at = now
        self._unpublished = unpublished

    def look_after(self, now: float, poll: float) -> float:
        return look_after(now, self._arrivals, self._changed_at, poll)


class NameChanges:
    """Tells whether names in a directory may have changed since the last look. It costs one call to the server.

    Opening a directory fetches its attributes on every mount with close-to-open; opening a file would give an NFSv4
    client a delegation, and whoever replaces that file then waits 0.1 s for its recall.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._seen: tuple[int, int] | None = None
        self._repeats = False

    def look(self) -> bool:
        """Return whether names may have changed.

        A change is told twice: a server dates two changes within a tick of its clock alike, so the second of them
        may not show.
        """
        self._disk.refresh(self._path)
        status = self._disk.stat(self._path)
        now = status.mtime_ns, status.inode
        has_changed, self._seen = now != self._seen, now
        repeats, self._repeats = self._repeats, has_changed
        return has_changed or repeats


class VersionLookout:
    """Looks for the next version of a job between two polls."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock, self._rhythm = job, clock, Rhythm()
        self._versions, self._steps = NameChanges(job.disk, job.state), NameChanges(job.disk, job.root)
        self._read: Version | None = None
        self._coming: list[str] = []

    def note(self, version: Version) -> None:
        if self._read is None or version.pair != self._read.pair:
            self._rhythm.note_version(self._clock.monotonic())
        self._read = version

    def wait(self, seconds: float, sleep: Callable[[float], None]) -> None:
        """Sleep until a version may have come, `seconds` at most."""
        clock, ends = self._clock, self._clock.monotonic() + seconds
        with contextlib.suppress(OSError):  # the next poll meets it, too, and reports it
            self._look_for_steps()
        while (left := ends - (now := clock.monotonic())) > 0:
            sleep(min(self._rhythm.look_after(now, seconds), left))
            with contextlib.suppress(OSError):
                if self._versions.look():
                    return

    def _look_for_steps(self) -> None:
        """Find the attempts, and the steps above the version that was read; list a job that has changed."""
        if self._steps.look():
            entries = self._job.disk.list(self._job.root)
            self._coming = [entry.name for entry in entries if entry.kind == "directory"]
        self._coming = [name for name in self._coming if self._is_coming(name)]
        self._rhythm.note_unpublished(self._clock.monotonic(), self._coming)

    def _is_coming(self, name: str) -> bool:
        step, newest = parse_step_name(name), -1 if self._read is None else self._read.step
        return parse_attempt_name(name) is not None or (step is not None and step > newest)
