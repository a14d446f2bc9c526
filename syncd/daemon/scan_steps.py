"""Scans the step directories and attempts of a job; examines again only those that may have changed."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from syncd.daemon import foreign
from syncd.daemon.examine import examine_attempt, examine_native
from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.entry_problem import required_read_problem
from syncd.protocol.layout import Job, parse_attempt_name, parse_step_name
from syncd.protocol.step import NATIVE, UNKNOWN_LAYOUT, Step, StepState
from syncd.protocol.version import Version

ARRIVING = 60.0
"""Seconds for which a step that becomes complete below the published one may still be named by the marker."""

LIST_EVERY = 2.0  # seconds between two listings of the job directory when nothing woke the scanner


@dataclass(frozen=True, slots=True)
class _Rejected:
    problem: str
    unread: str = ""  # which file of it could not be read, empty when all could
    is_retried: bool = False  # its content may be good: the next full scan lets it be verified again


@dataclass(slots=True)
class _Known:
    """A step as last examined, and when it was last seen to change."""

    step: Step
    since: float


class StepScanner:
    """Examines the steps of one job again and again, and calls `progress` after each one that it examined."""

    def __init__(self, job: Job, clock: Clock, progress: Callable[[], None]) -> None:
        self._job, self._clock, self._disk, self._progress = job, clock, job.disk, progress
        self._known: dict[int, _Known] = {}
        self._attempts: dict[str, _Known] = {}
        self._collected: Mapping[int, Step] = {}
        self._rejected: dict[tuple[int, str], _Rejected] = {}
        self._bad_shortcuts: dict[tuple[int, str], str] = {}
        self._unsettled: frozenset[int] = frozenset()
        self._doubted: set[int] = set()
        self._marked_to: int | None = None
        self._changed = self._has_listed = False
        self._listed = float("-inf")
        self._layouts = foreign.ForeignLayouts()
        self._published: int | None = None

    def scan_all(self, version: Version | None) -> None:
        self._rejected = {
            key: rejected for key, rejected in self._rejected.items() if not rejected.is_retried
        }
        self._begin(version)
        self._scan_listed(everything=True)

    def scan(self, version: Version | None, announced: int | None, now: float, *, listing: bool) -> None:
        """Examine the steps that may have changed.

        Args:
            announced: The step that the marker has just moved to, if it has moved.
            now: When the scan began, on this host's clock.
            listing: List the job now, although the last listing is recent.
        """
        self._begin(version)
        # A step that the marker names once more may have been written again in its old directory.
        if announced is not None:
            self._doubted.add(announced)
        if listing or now - self._listed >= LIST_EVERY:
            self._scan_listed(everything=False)
            return
        for number in self._restless():
            self._examine(number, self._known[number].step.directory)
            self._progress()
        if not self._scan_attempts(self._attempts):
            self._scan_listed(everything=False)  # an attempt has gone: it has become its step

    def forget(self, steps: Iterable[int]) -> None:
        """Drop what is known of steps that have just been removed, so that the next scan need not list for it."""
        for number in steps:
            self._changed |= self._known.pop(number, None) is not None
            for noted in (self._rejected, self._bad_shortcuts):
                for key in [key for key in noted if key[0] == number]:
                    del noted[key]

    def doubt(self, step: int) -> None:
        """Examine a step at the next scan: whoever tried to remove it found it changed."""
        self._doubted.add(step)

    def doubt_unmarked(self, tracker: int | None) -> None:
        """Doubt the sync steps that the trainer may have made full checkpoints: the one change of a sealed step.

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

    def reject(self, step: Step, problem: str, unread: str = "", *, is_retried: bool = False) -> Step:
        """Count a step as damaged from now on, as long as its content is the one that was found wrong; return it so.

        Args:
            unread: The file that could not be read, if that is all: once it can be read, the step is verified again.
            is_retried: Nothing was found wrong with it: it is verified again after the next full scan.
        """
        rejected = self._rejected[(step.step, step.digest)] = _Rejected(problem, unread, is_retried)
        entry = self._known.get(step.step)
        if entry and entry.step.digest == step.digest:
            entry.step = _damaged(entry.step, rejected)
            self._changed = True
        return _damaged(step, rejected)

    def reject_shortcut(self, step: Step, problem: str) -> None:
        """Count the shortcut of a step as unusable from now on, as long as the step's content is this one."""
        self._bad_shortcuts[(step.step, step.digest)] = problem
        entry = self._known.get(step.step)
        if entry and entry.step.digest == step.digest:
            entry.step = _with_bad_shortcut(entry.step, problem)
            self._changed = True

    def collect(self, looked: float) -> tuple[Mapping[int, Step], tuple[Step, ...]]:
        """Return the steps, with the latest attempt where a step has no directory, and the other attempts.

        Args:
            looked: When the scan began, on this host's clock: all that may change was looked at since.
        """
        steps = self._steps(looked)
        if not self._attempts:
            return steps, ()
        collected, rivals = dict(steps), []
        for _, entry in sorted(self._attempts.items(), key=lambda item: (-item[1].since, item[0])):
            attempt = replace(entry.step, unchanged_for=_unchanged(entry, looked))
            if collected.setdefault(attempt.step, attempt) is not attempt:
                rivals.append(attempt)
        return collected, tuple(rivals)

    def _steps(self, looked: float) -> Mapping[int, Step]:
        # With thousands of sealed steps this is the cost of an idle tick: only what still changes is built again, and
        # where nothing does, the mapping is the same one, which is compared at no cost.
        if self._changed:
            self._collected = {number: entry.step for number, entry in self._known.items()}
            unsettled = (number for number, step in self._collected.items() if not _is_settled(step))
            self._unsettled, self._changed = frozenset(unsettled), False
        if not self._unsettled:
            return self._collected
        steps = dict(self._collected)
        for number in self._unsettled:
            entry = self._known[number]
            unchanged = _unchanged(entry, looked)
            if entry.step.arriving and unchanged >= ARRIVING:
                entry.step, self._changed = replace(entry.step, arriving=False), True
            steps[number] = replace(entry.step, unchanged_for=unchanged)
        self._collected = steps
        return steps

    def _begin(self, version: Version | None) -> None:
        """Note what is published; forget the rejections of files that could not be read and can be now."""
        self._published = version.step if version else None
        for key, rejected in list(self._rejected.items()):
            if rejected.unread and self._is_readable(rejected.unread):
                del self._rejected[key]

    def _is_readable(self, path: str) -> bool:
        try:
            self._disk.read_at(path, 0, 1)
        except (*MISSING, CorruptDataError):
            return True  # the next examination of the step decides what it is now
        except OSError as error:
            required_read_problem(error, path)
            return False
        return True

    def _scan_listed(self, *, everything: bool) -> None:
        """List the job and examine what it shows; a failure on the way makes the next scan list again."""
        now, self._listed = self._clock.monotonic(), float("-inf")
        directories = self._list()
        self.forget(self._known.keys() - directories.keys())
        numbers: Iterable[int] = directories
        if not everything:
            numbers = (directories.keys() - self._known.keys()) | self._restless()
        for number in numbers:
            if number in directories:
                self._examine(number, directories[number])
                self._progress()
        self._listed, self._has_listed = now, True

    def _list(self) -> dict[int, str]:
        """Return the step directories of the job, step to directory name; examine the attempts beside them."""
        names: dict[int, str] = {}
        attempts = []
        for entry in self._disk.list(self._job.root):
            if entry.kind != "directory":
                continue
            if parse_attempt_name(entry.name) is not None:
                attempts.append(entry.name)
                continue
            native = parse_step_name(entry.name)
            step = native if native is not None else foreign.step_of(entry.name)
            # Of two directories that name one step, the one named by this protocol counts.
            if step is not None and (step not in names or native is not None):
                names[step] = entry.name
        self._scan_attempts(attempts)
        return names

    def _restless(self) -> set[int]:
        """Return the known steps that may change: a sealed step of this protocol never does."""
        # A step that has just gone is still among the unsettled until the scan is finished.
        restless = {number for number in self._unsettled & self._known.keys() if self._may_change(number)}
        restless |= self._doubted & self._known.keys()
        self._doubted.clear()
        return restless

    def _may_change(self, number: int) -> bool:
        published = -1 if self._published is None else self._published
        return self._known[number].step.state is not StepState.COMPLETE or number > published

    def _examine(self, number: int, directory: str) -> None:
        entry = self._known.get(number)
        step = self._examined(number, directory, entry.step if entry else None)
        if step is None:
            self.forget((number,))
            return
        if rejected := self._rejected.get((number, step.digest)):
            step = _damaged(step, rejected)
        if problem := self._bad_shortcuts.get((number, step.digest)):
            step = _with_bad_shortcut(step, problem)
        step = replace(step, arriving=entry.step.arriving if entry else self._is_arriving(step))
        if entry is None or entry.step != step:
            self._known[number] = _Known(step, self._clock.monotonic())
            self._changed = True

    def _examined(self, number: int, directory: str, before: Step | None) -> Step | None:
        """Return what a step is now; one that cannot be read stays as it was, and does not stop the scan."""
        is_native = parse_step_name(directory) is not None
        step = None
        try:
            if is_native:
                step = examine_native(self._disk, self._job.root, number, before)
            return step or self._layouts.examine(
                self._disk, self._job.root, directory, number, self._progress
            )
        except Exception as error:  # noqa: BLE001 - one step costs itself only
            entry_problem = required_read_problem(error, f"{self._job.root}/{directory}")
        earlier = before or Step(number, directory, NATIVE if is_native else UNKNOWN_LAYOUT)
        return replace(earlier, state=StepState.DAMAGED, problem=str(entry_problem), unreadable=True)

    def _is_arriving(self, step: Step) -> bool:
        """Return whether a step has appeared below the published one while this daemon scanned."""
        is_below = self._published is not None and step.step < self._published
        return is_below and self._has_listed and step.is_native and step.state is StepState.COMPLETE

    def _scan_attempts(self, names: Collection[str] | Mapping[str, object]) -> bool:
        """Examine attempts, which may change or become their step at any time; return whether all of them exist."""
        seen: dict[str, _Known] = {}
        for name in names:
            attempt, entry = self._examined_attempt(name), self._attempts.get(name)
            if attempt is not None:
                is_same = entry is not None and entry.step == attempt
                seen[name] = entry if entry and is_same else _Known(attempt, self._clock.monotonic())
            self._progress()
        is_whole = len(seen) == len(names)
        self._attempts = seen  # only now: a failure on the way forgets none
        return is_whole

    def _examined_attempt(self, name: str) -> Step | None:
        number = parse_attempt_name(name)
        assert number is not None  # its name made it an attempt
        try:
            return examine_attempt(self._disk, self._job.root, number, name)
        except Exception as error:  # noqa: BLE001 - one attempt costs itself only
            entry_problem = required_read_problem(error, f"{self._job.root}/{name}")
            return Step(number, name, problem=str(entry_problem), unreadable=True)


def _unchanged(entry: _Known, looked: float) -> float:
    return max(0.0, looked - entry.since)


def _damaged(step: Step, rejected: _Rejected) -> Step:
    is_unread = bool(rejected.unread) or rejected.is_retried
    return replace(
        step,
        state=StepState.DAMAGED,
        problem=rejected.problem,
        rejected=not is_unread,
        unreadable=is_unread,
    )


def _with_bad_shortcut(step: Step, problem: str) -> Step:
    return replace(step, shortcut=step.shortcut and step.shortcut._replace(problem=problem))


def _is_settled(step: Step) -> bool:
    return step.is_native and step.state is StepState.COMPLETE and not step.arriving
