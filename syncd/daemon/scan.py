"""The scanner: turns the files of a job into a `Snapshot`, reading no more than has to be read.

A look reads the marker, the version and the steps that may have changed: new ones, filling ones, the one the marker
names. A reconciliation, each minute and at start, examines every step again and so catches what looks missed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from syncd.daemon import foreign
from syncd.daemon.attempts import Attempts
from syncd.daemon.examine import examine_native
from syncd.daemon.snapshot import Module, Snapshot
from syncd.errors import (
    CorruptDataError,
    JobMissingError,
    JobReplacedError,
    ProtocolTooNewError,
    storage_error,
)
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.layout import Job, parse_attempt_name, parse_step_name
from syncd.protocol.marker import MISSING_MARKER, read_marker
from syncd.protocol.obstacle import obstacle_to_reading
from syncd.protocol.presence import TTL, Liveness, Presence, Presences
from syncd.protocol.request import read_pins, read_requests_and_problems
from syncd.protocol.step import NATIVE, UNKNOWN_LAYOUT, Step, StepState
from syncd.protocol.version import BELIEVED_GENERATION, Pair, Version, read_version

T = TypeVar("T")

MODULES_EVERY = 5.0
"""Seconds between two readings of the presences; around each removal they are read again all the same."""

MODULES_SHARE = 20
"""How many times as long as a reading of the presences took the next one is waited for, up to a quarter of the time
after which a module counts as dead."""

ARRIVING = 60.0
"""Seconds for which a step that becomes complete below the published one may yet be named by the marker."""

LIST_EVERY = 2.0
"""Seconds between two listings of the job directory when nothing woke the scanner."""


@dataclass(frozen=True, slots=True)
class _Rejected:
    """Why a step is not published, and which file of it could not be read, empty when all could."""

    problem: str
    unread: str = ""


@dataclass(slots=True)
class _Known:
    """A step as last examined, and when it was last seen to change."""

    step: Step
    since: float
    directory: str


class Scanner:
    """Looks at one job again and again.

    Args:
        job: The job.
        clock: This host's clock; all durations are on it.
        ttl: Seconds without a heartbeat after which an explorer or trainer counts as dead.
        progress: Called after each step that was examined: a look at many steps on a slow mount takes long.
    """

    def __init__(
        self, job: Job, clock: Clock, ttl: float = TTL, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._clock, self._disk, self._progress = job, clock, job.disk, progress
        self._ttl = ttl
        self.presences = Presences(job.disk)
        self._modules_took = 0.0
        self._root: tuple[int, int] | None = None
        self.start_anew(None)

    def start_anew(self, floor: Pair | None) -> None:
        """Forget all but which directory the job is: a new leader gives everybody the whole time to be seen.

        Args:
            floor: The highest pair known to be published.
        """
        self._known: dict[int, _Known] = {}
        self._attempts = Attempts(self._job, self._clock, self._progress)
        self._directories: dict[int, Step] = {}
        self._rejected: dict[tuple[int, str], _Rejected] = {}
        self._unsettled: frozenset[int] = frozenset()
        self._doubted: set[int] = set()
        self._marked_to: int | None = None
        self._changed = self._moved = self._has_listed = False
        self._layouts = foreign.ForeignLayouts()
        self._explorers, self._trainers = Liveness(self._ttl), Liveness(self._ttl)
        self._snapshot = Snapshot()
        self._marker_since = self._clock.monotonic()
        self._listed = self._modules_read = float("-inf")
        self.floor = floor
        self._applied: Pair | None = None

    def reconcile(self) -> Snapshot:
        """Examine everything.

        Raises:
            JobMissingError: The job directory is missing, or another one is in its place.
            OSError: The file system fails.
        """
        self.check_root()
        self._read_hints()
        self._try_rejected_again()
        self._examine_listed(everything=True)
        self._read_modules()
        return self._finish(free=self._free())

    def look(self, *, woken: bool = False) -> Snapshot:
        """Examine what may have changed since the last look.

        Args:
            woken: Something happened in the job directory: list it now.

        Raises:
            JobMissingError: The job directory is missing, or another one is in its place.
            OSError: The file system fails.
        """
        now = self._clock.monotonic()
        self._disk.refresh(self._job.root)
        moved = self._read_hints()
        self._try_rejected_again()
        if woken or moved or now - self._listed >= LIST_EVERY:
            self._examine_listed(everything=False)
        else:
            self._examine_again(self._restless())
            if not self._attempts.look():
                self._examine_listed(everything=False)  # one has gone: it has become its step
        if now - self._modules_read >= self._modules_every:
            self._read_modules()
        return self._finish(free=self._snapshot.free)

    @property
    def _modules_every(self) -> float:
        """Return the seconds between two readings of the presences, of which thousands take their time."""
        return max(MODULES_EVERY, min(MODULES_SHARE * self._modules_took, self._ttl / 4))

    def forget(self, steps: Iterable[int]) -> None:
        """Drop what is known of steps that have just been removed, so that the next look need not list for it."""
        for step in steps:
            self._drop(step)

    def look_again(self, step: int) -> None:
        """Examine a step at the next look: who went to remove it found it other than it was."""
        self._doubted.add(step)

    def reject(self, step: Step, problem: str, unread: str = "") -> Step:
        """Take a step for damaged from now on, as long as its content is the one that was found wrong.

        Args:
            step: The step.
            problem: What was found.
            unread: The file that could not be read, if that is all: once it can be, the step is judged again.

        Returns:
            The step as it is known now.
        """
        rejected = self._rejected[(step.step, step.digest)] = _Rejected(problem, unread)
        known = self._known.get(step.step)
        if known and known.step.digest == step.digest:
            known.step = _damaged(known.step, rejected)
            self._changed = True
        return _damaged(step, rejected)

    def _try_rejected_again(self) -> None:
        """Forget what was only not readable and can be read now."""
        for key, rejected in list(self._rejected.items()):
            if rejected.unread and self._is_readable(rejected.unread):
                del self._rejected[key]

    def _is_readable(self, path: str) -> bool:
        try:
            self._disk.read_at(path, 0, 1)
        except (*MISSING, CorruptDataError):
            return True  # another look at the step says what it is now
        except OSError as error:
            if obstacle_to_reading(error, path) is None:
                raise
            return False
        return True

    def _drop(self, number: int) -> None:
        self._changed |= self._known.pop(number, None) is not None
        for key in [key for key in self._rejected if key[0] == number]:
            del self._rejected[key]

    def check_root(self) -> None:
        """Refuse to take an unmounted or replaced directory for an empty job."""
        root = self._job.root
        try:
            found = self._disk.stat(root)
        except MISSING:
            raise JobMissingError(
                "the job directory is not there", path=root, hint=f"ls -ld {root}"
            ) from None
        if found.kind != "directory":
            raise JobMissingError("the job directory is not a directory", path=root, hint=f"ls -ld {root}")
        born = self._disk.born(root)
        if self._root is not None and _is_another((found.inode, born), self._root):
            raise JobReplacedError(
                "another directory is in the place of the job, perhaps unmounted",
                path=root,
                hint=f"findmnt -T {root}",
            )
        self._root = found.inode, born

    def _read_hints(self) -> bool:
        """Read marker, tracker and version; say whether the marker has moved."""
        before = self._snapshot
        marker = read_marker(self._disk, self._job.marker)
        self._moved = marker != before.marker
        if self._moved:
            self._marker_since = self._clock.monotonic()
        version, problem = self._version()
        self._snapshot = replace(before, marker=marker, version=version, version_problem=problem)
        # Where there is a marker the tracker only protects, and is read with the presences; else it leads.
        if marker.problem == MISSING_MARKER.problem:
            self._read_tracker()
        return self._moved

    def _read_tracker(self) -> None:
        found = read_marker(self._disk, self._job.tracker)
        step = self._snapshot.tracker if found.unreadable else found.step
        problem = found.problem if found.unreadable else ""
        self._snapshot = replace(self._snapshot, tracker=step, tracker_problem=problem)

    def _version(self) -> tuple[Version | None, str]:
        try:
            return read_version(self._job), ""
        except ProtocolTooNewError:
            raise
        except CorruptDataError as error:
            return None, error.message

    def _list(self) -> dict[int, str]:
        """Return the step directories of the job, step to directory name; look at the attempts beside them."""
        found: dict[int, str] = {}
        attempts = []
        for entry in self._disk.list(self._job.root):
            if entry.kind != "directory":
                continue
            if parse_attempt_name(entry.name) is not None:
                attempts.append(entry.name)
                continue
            step = parse_step_name(entry.name)
            if step is None:
                step = foreign.step_of(entry.name)
            # Of two directories that name one step, the one of this protocol's own naming is it.
            if step is not None and (step not in found or parse_step_name(entry.name) is not None):
                found[step] = entry.name
        self._attempts.look(attempts)
        return found

    def _examine_listed(self, *, everything: bool) -> None:
        """List the job and examine what it says; what fails on the way is listed again at the next look."""
        now, self._listed = self._clock.monotonic(), float("-inf")
        self._examine(self._list(), everything=everything)
        self._listed, self._has_listed = now, True

    def _examine(self, directories: dict[int, str], *, everything: bool) -> None:
        for gone in self._known.keys() - directories.keys():
            self._drop(gone)
        again = (
            directories.keys() if everything else (directories.keys() - self._known.keys()) | self._restless()
        )
        for number in again:
            if number in directories:
                self._examine_one(number, directories[number])
                self._progress()

    def _examine_again(self, numbers: set[int]) -> None:
        for number in numbers:
            self._examine_one(number, self._known[number].directory)
            self._progress()

    def _restless(self) -> set[int]:
        """Return the known steps that may change: a sealed step of this protocol never does."""
        version, hint = self._snapshot.version, self._snapshot.hint
        published = version.step if version else -1
        # A step that has just gone is still among the unsettled until the look is finished.
        there = self._unsettled & self._known.keys()
        restless = {number for number in there if self._is_restless(self._known[number].step, published)}
        # A step that the marker names anew may have been written again in its old directory.
        if self._moved and hint in self._known:
            restless.add(hint)
        restless |= self._doubted & self._known.keys()
        self._doubted.clear()
        return restless

    def _is_restless(self, step: Step, published: int) -> bool:
        return step.state is not StepState.COMPLETE or step.step > published

    def _examine_one(self, number: int, directory: str) -> None:
        known = self._known.get(number)
        step = self._examined(number, directory, known.step if known else None)
        if step is None:
            self._drop(number)
            return
        if rejected := self._rejected.get((number, step.digest)):
            step = _damaged(step, rejected)
        step = replace(step, arriving=known.step.arriving if known else self._is_arriving(step))
        if known is None or known.step != step:
            self._known[number] = _Known(step, self._clock.monotonic(), directory)
            self._changed = True

    def _examined(self, number: int, directory: str, before: Step | None) -> Step | None:
        """Return what a step is now; one that cannot be read is kept, and costs no other step its look."""
        step = None
        try:
            if parse_step_name(directory) is not None:
                step = examine_native(self._disk, self._job.root, number, before)
            return step or self._layouts.examine(
                self._disk, self._job.root, directory, number, self._progress
            )
        except OSError as error:
            obstacle = obstacle_to_reading(error, f"{self._job.root}/{directory}")
            if obstacle is None:
                raise
        known = before or Step(
            number, directory, NATIVE if parse_step_name(directory) is not None else UNKNOWN_LAYOUT
        )
        return replace(known, state=StepState.DAMAGED, problem=str(obstacle), unreadable=True)

    def _read_modules(self) -> None:
        self._modules_read = self._clock.monotonic()
        unlisted: list[str] = []
        explorers = self._listed_or(unlisted, self._job.explorers, self._read_presences)
        trainers = self._listed_or(unlisted, self._job.trainers, self._read_presences)
        # The time after the reading: a heartbeat counts from when it can have been seen, not from before a stall.
        seen_at, before = self._clock.monotonic(), self._snapshot
        self._modules_took = seen_at - self._modules_read
        unreadable: dict[str, str] = {}
        pins = self._listed_or(unlisted, self._job.pins, lambda _: read_pins(self._job, unreadable))
        self._read_tracker()
        self._doubt_unmarked(self._snapshot.tracker)
        # Where a directory cannot be listed now, what was there last is still what is known.
        self._snapshot = replace(
            self._snapshot,
            explorers=before.explorers
            if explorers is None
            else _modules(explorers, self._explorers, seen_at),
            trainers=before.trainers if trainers is None else _modules(trainers, self._trainers, seen_at),
            pins=before.pins if pins is None else pins,
            unlisted=tuple(unlisted),
            unreadable_pins=unreadable,
        )
        self._applied = self._highest_applied()

    def _read_presences(self, directory: str) -> dict[str, Presence]:
        readable, unreadable = self.presences.read(directory)
        return readable | unreadable

    def _listed_or(self, unlisted: list[str], directory: str, read: Callable[[str], T]) -> T | None:
        """Read a directory; note one that cannot be listed, and return None."""
        try:
            return read(directory)
        except OSError as error:
            obstacle = obstacle_to_reading(error, directory)
            if obstacle is None:
                raise
            unlisted.append(str(obstacle))
            return None

    def _doubt_unmarked(self, tracker: int | None) -> None:
        """Doubt the one thing that changes about a sealed step: what was a sync step may be a full checkpoint by now.

        The tracker moves after the mark of each, so it says how far there may be new ones.
        """
        if tracker is None:
            return
        since = tracker if self._marked_to is None else min(self._marked_to, tracker)
        near = (
            [tracker] if since == tracker else [number for number in self._known if since < number <= tracker]
        )
        self._doubted.update(
            number for number in near if number in self._known and not self._known[number].step.full
        )
        self._marked_to = tracker

    def _free(self) -> int | None:
        try:
            return self._disk.free(self._job.root)
        except OSError:
            return None

    def _finish(self, free: int | None) -> Snapshot:
        # Read first: what fails must not lose the changes that the steps below take over.
        unlisted: list[str] = []
        unreadable: dict[str, str] = {}
        found = self._listed_or(
            unlisted, self._job.requests, lambda _: read_requests_and_problems(self._job, unreadable)
        )
        (requests, problems), now = found or ((), ()), self._clock.monotonic()
        steps, rivals = self._attempts.beside(self._steps(now), now)
        self._snapshot = replace(
            self._snapshot,
            steps=steps,
            rivals=rivals,
            marker_stable_for=now - self._marker_since,
            floor=self._highest(),
            requests=requests,
            obstacles=(*unlisted, *problems),
            unreadable_requests=unreadable,
            free=free,
        )
        return self._snapshot

    def _steps(self, now: float) -> dict[int, Step]:
        # With thousands of sealed steps this is the cost of an idle tick: only what still moves is built anew.
        steps = dict(self._directories)
        if self._changed:
            steps = {number: known.step for number, known in self._known.items()}
            self._unsettled = frozenset(n for n, step in steps.items() if not _is_settled(step))
            self._changed = False
        for number in self._unsettled:
            known = self._known[number]
            self._arrive(known, now)
            steps[number] = replace(known.step, unchanged_for=now - known.since)
        self._directories = steps
        return steps

    def _arrive(self, known: _Known, now: float) -> None:
        """Let a step that has been complete for long count as any other."""
        if known.step.arriving and now - known.since >= ARRIVING:
            known.step, self._changed = replace(known.step, arriving=False), True

    def _is_arriving(self, step: Step) -> bool:
        """Say whether a step has appeared below the published one while this daemon looked."""
        version = self._snapshot.version
        is_below = version is not None and step.step < version.step
        return is_below and self._has_listed and step.is_native and step.state is StepState.COMPLETE

    def _highest(self) -> Pair | None:
        """Return the highest pair known: of the version file, of earlier leaders, of what explorers have applied."""
        version = self._snapshot.version
        pairs = (self.floor, version.pair if version else None, self._applied)
        self.floor = max((pair for pair in pairs if pair is not None), default=None)
        return self.floor

    def _highest_applied(self) -> Pair | None:
        applied = (module.presence.applied for module in self._snapshot.explorers.values())
        believed = (pair for pair in applied if pair is not None and pair[0] <= BELIEVED_GENERATION)
        return max(believed, default=None)


def _damaged(step: Step, rejected: _Rejected) -> Step:
    return replace(step, state=StepState.DAMAGED, problem=rejected.problem, unreadable=bool(rejected.unread))


def _is_another(found: tuple[int, int], known: tuple[int, int]) -> bool:
    """Say whether a directory is not the one that is known, by number and birth: a number is given again."""
    return found[0] != known[0] or (0 not in (found[1], known[1]) and found[1] != known[1])


def _is_settled(step: Step) -> bool:
    return step.is_native and step.state is StepState.COMPLETE and not step.arriving


def _modules(presences: dict[str, Presence], liveness: Liveness, now: float) -> dict[str, Module]:
    liveness.observe(
        now, [(name, (presence.incarnation, presence.beat)) for name, presence in presences.items()]
    )
    return {
        name: Module(presence, liveness.is_alive(name, now), liveness.silent_for(name, now))
        for name, presence in presences.items()
    }


def examine_all(job: Job, clock: Clock) -> Snapshot:
    """Look at a job once, as a reader that leads nothing: for views and one-shot commands.

    Raises:
        SyncdError: The job directory is missing.
        StorageError: It cannot be read.
    """
    try:
        return Scanner(job, clock).reconcile()
    except OSError as error:
        raise storage_error(error, job.root) from error
