"""The attempts to write a step that lie in a job, and when each of them was last seen to change."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from syncd.daemon.examine import examine_attempt
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job, parse_attempt_name
from syncd.protocol.obstacle import obstacle_to_reading
from syncd.protocol.step import Step


@dataclass(frozen=True, slots=True)
class _Seen:
    step: Step
    since: float


class Attempts:
    """The attempts of one job: each is examined at every look, since it may change or become its step.

    Args:
        job: The job.
        clock: This host's clock; all durations are on it.
        progress: Called after each attempt that was examined.
    """

    def __init__(self, job: Job, clock: Clock, progress: Callable[[], None]) -> None:
        self._job, self._clock, self._progress = job, clock, progress
        self._seen: dict[str, _Seen] = {}

    def look(self, listed: Collection[str] | None = None) -> bool:
        """Examine the attempts; say whether all of them are there.

        Args:
            listed: The names of attempts that a listing of the job has just found; those of before unless given.
        """
        names, seen = self._seen if listed is None else listed, {}
        for name in names:
            found, known = self._examined(name), self._seen.get(name)
            if found is not None:
                is_same = known is not None and known.step == found
                seen[name] = known if known and is_same else _Seen(found, self._clock.monotonic())
            self._progress()
        is_whole = len(seen) == len(names)
        self._seen = seen  # only now: what fails on the way forgets none
        return is_whole

    def beside(self, steps: Mapping[int, Step], now: float) -> tuple[dict[int, Step], tuple[Step, ...]]:
        """Return the steps, with the latest attempt where a step has no directory, and the other attempts."""
        found, rivals = dict(steps), []
        for _, seen in sorted(self._seen.items(), key=lambda item: (-item[1].since, item[0])):
            attempt = replace(seen.step, unchanged_for=now - seen.since)
            if found.setdefault(attempt.step, attempt) is not attempt:
                rivals.append(attempt)
        return found, tuple(rivals)

    def _examined(self, name: str) -> Step | None:
        number = parse_attempt_name(name)
        assert number is not None  # by its name it was taken for an attempt
        try:
            return examine_attempt(self._job.disk, self._job.root, number, name)
        except OSError as error:
            obstacle = obstacle_to_reading(error, f"{self._job.root}/{name}")
            if obstacle is None:
                raise
            return Step(number, name, problem=str(obstacle), unreadable=True)
