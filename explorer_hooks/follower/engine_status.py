"""What a follower knows of its engine: the version that it runs, and why it can do no work."""

from collections.abc import Callable

from explorer_hooks.hook import Running
from explorer_hooks.proof.prover import UnprovenLoads
from syncd.errors import TROUBLESHOOTING, EngineDeadError, EngineUnreachableError, LoadFailedError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineState
from syncd.protocol.version import Pair

_SOONEST = 0.2
"""Seconds before an engine that did not answer is polled again; doubled each time, up to the usual interval."""


class EngineStatus:
    """What is known of one engine. The follower's thread changes it; any thread may read it.

    Args:
        every: Seconds between two polls.
        pair_of_label: Returns the pair of the job's version that a label names, None if it names none.
    """

    def __init__(
        self, clock: Clock, every: float, pair_of_label: Callable[[str | None], Pair | None]
    ) -> None:
        self._clock, self._every, self._pair_of_label = clock, every, pair_of_label
        self.applied: Pair | None = None
        """The version of the job that it runs; None for its start weights, and while it has a disorder."""
        self.label: str | None = None
        self.is_reachable = False
        self.is_suspect = False
        """Whether it may be half loaded: it was left paused, or went away during a load."""
        self.reason = ""
        self.dead: EngineDeadError | None = None
        self.wrong: LoadFailedError | None = None
        """Why it answers as weights of no version; only another load can mend that."""
        self.start_problem: LoadFailedError | None = None
        """Why its start weights are not the job's; None if they are, or if nobody knows."""
        self.unfit: LoadFailedError | None = None
        """Why its way of loading does not reach every tensor, so it gets no version; None if nothing shows it."""
        self.is_examined = False  # whether it is examined now, so that it runs weights of no version
        self.is_proven = False  # whether it has answered the probe of what it runs
        self.unproven = UnprovenLoads()
        self.died_loading: Pair | None = None
        """The version during whose load it went away, to come back as a new process; None once that was counted."""
        self._lost_in: Pair | None = None
        """The version during whose load its connection was lost, until it answers again."""
        self._next, self._pause = float("-inf"), _SOONEST

    @property
    def is_due(self) -> bool:
        return self._clock.monotonic() >= self._next

    @property
    def is_known(self) -> bool:
        """Return whether it runs a version of the job, or its start model."""
        return self.applied is not None or self.label is None

    def disorder(self) -> tuple[EngineState, str] | None:
        """Return the state in which it can do no work, and why; None if it can."""
        if self.dead is not None:
            return EngineState.DEAD, str(self.dead)
        if not self.is_reachable:
            return EngineState.UNREACHABLE, self.reason
        if self.is_examined:
            return EngineState.LOADING, "it is being examined"
        reason = self._wrong()
        return (EngineState.WRONG, reason) if reason else None

    def _wrong(self) -> str:
        """Return why its weights are of no version of the job, or would not become one; empty if they are."""
        start = self.start_problem if self.label is None else None
        for problem in (self.unfit, self.wrong, start):  # the first names what is not loaded
            if problem is not None:
                return str(problem)
        return "" if self.is_known else f"it runs {self.label!r}, which is no version of this job"

    def answered(self, running: Running) -> None:
        if self._lost_in is not None:
            self.died_loading, self._lost_in = self._lost_in if _has_restarted(running) else None, None
        if self.dead is not None and running.label != self.label:
            self.dead = None  # it was restarted
        if running.label != self.label:
            self.wrong, self.is_proven = None, False
        self.label, self.reason, self.is_reachable = running.label, "", True
        is_good = self.dead is None and self.wrong is None
        self.applied = self._pair_of_label(running.label) if is_good else None
        self.is_suspect = self.is_suspect or running.paused
        self._next, self._pause = self._clock.monotonic() + self._every, _SOONEST

    def loaded(self, running: Running) -> None:
        """Note that it runs whole weights, and which ones."""
        self.is_suspect, self.wrong = False, None
        self.answered(running)

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that it does not answer: what it runs is unknown until it does."""
        self.applied, self.is_reachable, self.reason = None, False, str(error)
        self.dead = None  # the process that answers next is another one, or is polled again
        self._next = self._clock.monotonic() + min(self._pause, self._every)
        self._pause *= 2

    def lose_loading(self, pair: Pair, error: EngineUnreachableError) -> None:
        """Note that it went away while it loaded a version, so that it may be half loaded."""
        self.is_suspect, self._lost_in = True, pair
        self.unproven.end(is_proven=False)
        self.lose(error)

    def die(self, error: EngineDeadError) -> None:
        """Note that it cannot be restored."""
        error.hint = error.hint or f"restart the engine, then its follower: {TROUBLESHOOTING}#exit-code-69"
        self.applied, self.reason, self.dead = None, str(error), error

    def mark_wrong(self, error: LoadFailedError) -> None:
        """Note that it answers as weights of no version: it gets no work until a version is loaded that it proves."""
        self.wrong, self.reason, self.is_proven, self.applied = error, str(error), False, None


def _has_restarted(running: Running) -> bool:
    return running.label is None and not running.paused
