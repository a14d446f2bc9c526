"""One inference engine: what is known of it, what it says that it runs, and the version that restores it."""

import contextlib
from collections.abc import Callable, Mapping

from explorer_hooks.follower.versions import Fetcher
from explorer_hooks.hook import Hook, Running, Unproven
from explorer_hooks.proof.judgement import UnprovenError
from explorer_hooks.proof.prover import Prover
from syncd.errors import (
    TROUBLESHOOTING,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
)
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineState
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.files.leased_directory import HeldDirectory

WHOLE = "weights"  # the kind of a version that is all tensors of a model

_ASKS = 4
_ASK_PAUSE = 0.1
"""How often an engine is asked at once what it runs if its connection was lost in a load, and seconds in between."""

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
        self.exam = ""
        """Passed, failed, off, or why it was not examined; empty before that is known."""
        self.unseen: tuple[str, ...] = ()  # the kinds of tensors that its exam could not see
        self.is_proven = False  # whether it has answered the probe of what it runs
        self.unproven = UnprovenLoads()
        self.died_loading: Pair | None = None
        """The version during whose load it went away, to come back as a new process; None once that was counted."""
        self._lost_in: Pair | None = None
        """The version during whose load its connection was lost, until it answers again."""
        self._shows_restart = False
        """Whether a restart can be told from a network that was out: it ran a version before, or nobody listened."""
        self._next, self._pause = float("-inf"), _SOONEST

    @property
    def is_due(self) -> bool:
        return self._clock.monotonic() >= self._next

    @property
    def is_known(self) -> bool:
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
            has_died = self._shows_restart and _has_restarted(running)
            self.died_loading, self._lost_in = self._lost_in if has_died else None, None
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
        self.is_suspect, self.wrong = False, None
        self.answered(running)

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that it does not answer: what it runs is unknown until it does."""
        self.applied, self.is_reachable, self.reason = None, False, str(error)
        self.dead = None  # the process that answers next is another one, or is polled again
        self._shows_restart |= isinstance(error.__cause__, ConnectionRefusedError)
        self._next = self._clock.monotonic() + min(self._pause, self._every)
        self._pause *= 2

    def lose_loading(self, pair: Pair, error: EngineUnreachableError) -> None:
        """Note that it went away while it loaded a version, so that it may be half loaded."""
        self.is_suspect, self._lost_in, self._shows_restart = True, pair, self.label is not None
        self.unproven.end(is_proven=False)
        self.lose(error)

    def die(self, error: EngineDeadError) -> None:
        error.hint = error.hint or f"restart the engine, then its follower: {TROUBLESHOOTING}#exit-code-69"
        self.applied, self.reason, self.dead = None, str(error), error

    def mark_wrong(self, error: LoadFailedError) -> None:
        """Note that it answers as weights of no version: it gets no work until a version is loaded that it proves."""
        self.wrong, self.reason, self.is_proven, self.applied = error, str(error), False, None


def _has_restarted(running: Running) -> bool:
    return running.label is None and not running.paused


class UnprovenLoads:
    """Which weights an engine has worked on without a proof. One thread changes it, any may read `by_label`."""

    def __init__(self) -> None:
        self.by_label: Mapping[str, Unproven] = {}
        self._pending: str | None = None

    def begin(self, label: str) -> None:
        """Note that the engine is about to work on weights whose probe it has not answered yet."""
        if label != self._pending:
            self.end(is_proven=False)
            self._pending = label
            self._note(label, self._failed(label), pending=True)

    def end(self, *, is_proven: bool) -> None:
        """Note that it has answered the probe, so that its work was of the right weights, or that it never will."""
        label, self._pending = self._pending, None
        if label is not None:
            self._note(label, self._failed(label) + (not is_proven), pending=False)

    def _failed(self, label: str) -> int:
        return self.by_label.get(label, Unproven()).failed

    def _note(self, label: str, failed: int, *, pending: bool) -> None:
        kept = {key: value for key, value in self.by_label.items() if key != label}
        self.by_label = {**kept, label: Unproven(failed, pending)} if failed or pending else kept


class RunningEngine:
    """Asks the engine behind a hook, has it prove its answers, and rolls it back."""

    def __init__(
        self, hook: Hook, status: EngineStatus, fetcher: Fetcher, prover: Prover, clock: Clock
    ) -> None:
        self.hook, self.status = hook, status
        self._fetcher, self._prover, self._clock = fetcher, prover, clock
        self.good: HeldDirectory | None = None  # the last good version, which a failed load restores
        self.first_whole: WeightDirectory | None = None  # all further versions have the same tensors

    def running(self) -> Running:
        """Return what the engine says that it runs. Any thread may call this."""
        return self.hook.current_version()

    def ask(self) -> None:
        try:
            running = self.running()
        except EngineUnreachableError as error:
            self.status.lose(error)
        else:
            self.status.answered(running)

    def ask_again(self) -> Running:
        for _ in range(_ASKS - 1):
            with contextlib.suppress(EngineUnreachableError):
                return self.running()
            self._clock.sleep(_ASK_PAUSE)
        return self.running()

    def good_if_running(self) -> WeightDirectory | None:
        good, status = self.good.directory if self.good else None, self.status
        return good if good is not None and good.label == status.label and not status.is_suspect else None

    def prove(self, weights: WeightDirectory | WeightTensors, *, again: bool = False) -> None:
        """Have it prove a version that it says it runs; if it cannot, it is wrong until another version is loaded."""
        status = self.status
        try:
            if self._prover.can_prove(weights):
                status.unproven.begin(weights.label)
            status.is_proven = self._prover.prove(weights, again=again) is not None
            status.unproven.end(is_proven=True)
        except RefusedError:
            # The kind of its adapter cannot be read now, which says nothing about the engine.
            status.is_proven = status.is_proven and again
            status.unproven.end(is_proven=again)
        except EngineUnreachableError as error:
            status.unproven.end(is_proven=False)
            status.lose(error)
        except LoadFailedError as error:
            status.unproven.end(is_proven=False)
            status.mark_wrong(error)

    def roll_back(self) -> None:
        """Put the engine back on the last good version, and read from it what it runs then.

        An engine that went away meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version is damaged, or was removed while this process was stopped for too long: the newest version may
        still save it.
        """
        status = self.status
        status.is_suspect = True
        status.unproven.end(is_proven=False)
        if self.good is not None and not self.good.is_usable():
            self.release()
            self.ask()
            return
        try:
            self.hook.abort(self.good.directory if self.good else None)
        except EngineUnreachableError as error:
            status.lose(error)
        except Exception as error:
            lost = EngineDeadError(f"it cannot be restored: {error}")
            dead = error if isinstance(error, EngineDeadError) else lost
            status.die(dead)
            raise dead from error
        else:
            status.is_suspect, status.wrong = False, None
            self.ask()
            if self.good is not None and status.is_reachable:
                self.prove(self.good.directory)

    def leave_unproven(self, error: UnprovenError) -> None:
        """Go back to the last good version; without one it stays as it is, and is given no work."""
        if self.good is not None:
            self.roll_back()
            return
        self.status.unproven.end(is_proven=False)
        self.ask()
        self.status.mark_wrong(error)

    def keep_running(self, pair: Pair) -> None:
        held = self._fetcher.fetch_running(pair)
        if held is not None:
            self.keep(held)
            self.prove(held.directory)

    def keep(self, held: HeldDirectory) -> None:
        held.keep_durable()
        before, self.good = self.good, held
        directory = held.directory
        if self.first_whole is None and directory.version.kind == WHOLE and directory.tensors:
            self.first_whole = directory
        if before is not None and before is not held:
            before.close()

    def release(self) -> None:
        good, self.good = self.good, None
        if good is not None:
            good.close()
