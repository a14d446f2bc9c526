"""One engine behind its hook: what it runs, loading a version into it, and restoring it if that fails."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from explorer_hooks.follower.proof import UnprovenError
from explorer_hooks.follower.prover import Prover, UnprovenLoads
from explorer_hooks.follower.versions import KnownVersions
from explorer_hooks.hook import ChangesHook, Hook, Running, UntouchedError
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineState, Proof
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.files.directory import HeldDirectory, LoadTimings
from syncd.transports.tensors import Tensors, compare, require_fit

if TYPE_CHECKING:
    from syncd.protocol.version import Pair

_WHOLE = "weights"
_ASKS = 4
_ASK_PAUSE = 0.1
"""How often an engine is asked at once what it runs if its connection was lost in a load, and seconds in between."""

_SOONEST = 0.2
"""Seconds before an engine that did not answer is polled again; doubled each time, up to the usual interval."""


class InterruptedLoadError(LoadFailedError):
    """The connection to the engine was lost during a load, and nothing shows that the engine ended: load it again."""

    code = "load_interrupted"


class Engine:
    """One engine behind its hook.

    Args:
        every: Seconds between two polls.
        versions: The versions of the job.
        prover: Has the engine prove what it runs.
    """

    def __init__(
        self, hook: Hook, clock: Clock, every: float, versions: KnownVersions, prover: Prover
    ) -> None:
        self._hook, self._clock, self._every, self._versions = hook, clock, every, versions
        self._prover = prover
        self.applied: Pair | None = None
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
        self.is_proven = False
        """Whether it has answered the probe of what it runs."""
        self.unproven = UnprovenLoads()
        self.died_loading: Pair | None = None
        """The version during whose load it went away, to come back as a new process; None once that was counted."""
        self._lost_in: Pair | None = None
        """The version during whose load its connection was lost, until it answers again."""
        self.good: HeldDirectory | None = None
        """The last good version, which a failed load restores."""
        self._reference: Tensors | None = None
        """The tensors of the first version that was applied: each further version has the same ones."""
        self._next, self._pause = float("-inf"), _SOONEST

    @property
    def is_due(self) -> bool:
        """Return whether it is time to poll the engine."""
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
        if self.wrong is not None:
            return EngineState.WRONG, str(self.wrong)
        if self.label is None and self.start_problem is not None:
            return EngineState.WRONG, str(self.start_problem)
        if not self.is_known:
            return EngineState.WRONG, f"it runs {self.label!r}, which is no version of this job"
        return None

    def running(self) -> Running:
        """Return what the engine says that it runs. Any thread may call this."""
        return self._hook.current_version()

    def poll(self) -> None:
        """Read from the engine what it runs."""
        try:
            running = self.running()
        except EngineUnreachableError as error:
            self.lose(error)
        else:
            self._update(running)

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that it does not answer: what it runs is unknown until it does."""
        self.applied, self.is_reachable, self.reason = None, False, str(error)
        self.dead = None  # the process that answers next is another one, or is polled again
        self._next = self._clock.monotonic() + min(self._pause, self._every)
        self._pause *= 2

    def die(self, error: EngineDeadError) -> None:
        """Note that it cannot be restored."""
        error.hint = error.hint or "restart the engine"
        self.applied, self.reason, self.dead = None, str(error), error

    def keep(self, held: HeldDirectory) -> None:
        """Make a version the one to restore; the previous one is given up."""
        held.keep_durable()
        before, self.good = self.good, held
        directory = held.directory
        if self._reference is None and directory.version.kind == _WHOLE and directory.tensors:
            self._reference = directory.tensors
        if before is not None and before is not held:
            before.close()

    def release(self) -> None:
        """Give up the last good version."""
        good, self.good = self.good, None
        if good is not None:
            good.close()

    def close(self) -> None:
        """Give up the last good version and close the hook; the engine keeps running."""
        self.release()
        self._hook.close()

    def prepare(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        """Do everything that needs no change of the engine."""
        with timings.part("prepare"):
            try:
                self._require_fit(directory)
                self._hook.prepare(directory)
            except SyncdError:
                raise
            except Exception as error:
                raise _load_failure("prepare", error) from error

    def load(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        """Load a version and have the engine prove and confirm it; if anything fails, the engine is restored."""
        before = self.label
        try:
            proven = self._load_and_prove(directory, timings)
            with timings.part("confirm"):
                running = self.running()
                _require_confirmed(directory, running)
        except EngineDeadError as error:
            self.die(error)
            raise
        except UnprovenError as error:
            self._leave_unproven(error)
            raise
        except EngineUnreachableError as error:
            self._regain(directory, before, error)
            return
        except Exception as error:
            self.restore()
            raise _load_failure("load", error) from error
        except BaseException:
            self.restore()
            raise
        self.unproven.end(is_proven=True)
        self._settle(running)
        self.is_proven = proven
        with contextlib.suppress(SyncdError):
            self._hook.settle(directory)

    def fill_seconds(self) -> float | None:
        """Return what it took to put the last version into memory of this process; None for other engines."""
        return self._hook.fill_seconds() if isinstance(self._hook, ChangesHook) else None

    def _load_and_prove(self, directory: WeightDirectory, timings: LoadTimings) -> bool:
        """Load a version and return whether the engine has proven it, before it works again if it can."""
        can_prove, is_held = self._prover.can_prove(directory), self._prover.is_held
        if can_prove:
            with timings.part("prove"):
                self._prover.begin(self._running_version(), directory)
        with timings.part("load"):
            self._hook.load(directory)
        if can_prove and is_held:
            self._prove(directory, timings)
        if can_prove and not is_held:
            self.unproven.begin(directory.label)  # it works before its answer, which may show other weights
        with timings.part("load"):
            self._hook.commit(directory)
        if can_prove and not is_held:
            self._prove(directory, timings)
        return can_prove

    def _regain(self, directory: WeightDirectory, before: str | None, error: EngineUnreachableError) -> None:
        """Return if an engine whose connection was lost in a load has loaded the version all the same.

        Args:
            before: The label that the engine had before.
        """
        try:
            running = self._ask_again()
        except EngineUnreachableError as lost:
            self.is_suspect, self._lost_in = True, directory.version.pair
            self.unproven.end(is_proven=False)
            self.lose(lost)
            raise _interrupted(error) from error
        if running == Running(directory.label, unproven=running.unproven):
            self._accept(directory, running, error)
            return
        has_restarted = before is not None and running.label is None and not running.paused
        if has_restarted or self.good is not None:
            self.restore()
        else:
            self.is_suspect = True
            self.unproven.end(is_proven=False)
            self._update(running)
        raise (_load_failure("load", error) if has_restarted else _interrupted(error)) from error

    def _ask_again(self) -> Running:
        """Return what it says that it runs, asked a few times if its connection is lost again."""
        for _ in range(_ASKS - 1):
            with contextlib.suppress(EngineUnreachableError):
                return self.running()
            self._clock.sleep(_ASK_PAUSE)
        return self.running()

    def _accept(self, directory: WeightDirectory, running: Running, error: EngineUnreachableError) -> None:
        """Accept a version that it says it runs after its connection was lost, once it has proven it."""
        self._settle(running)
        self.prove_running(directory)
        if self.wrong is not None:
            wrong = self.wrong
            if self.good is not None:
                self.restore()
            raise wrong
        if not self.is_reachable:
            raise _interrupted(error) from error

    def _running_version(self) -> WeightDirectory | None:
        """Return the version that it runs, None if its files are not on this host."""
        good = self.good.directory if self.good is not None else None
        return good if good is not None and good.label == self.label and not self.is_suspect else None

    def _prove(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        with timings.part("prove"):
            self._prover.prove(directory)

    def restore(self) -> None:
        """Put the engine back on the last good version, and read from it what it runs then.

        An engine that went away meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version is damaged, or was removed while this process was stopped for too long: the newest version may
        still save it.
        """
        self.is_suspect = True
        self.unproven.end(is_proven=False)
        if self.good is not None and not self.good.is_usable():
            self.release()
            self.poll()
            return
        try:
            self._hook.abort(self.good.directory if self.good else None)
        except EngineUnreachableError as error:
            self.lose(error)
        except Exception as error:
            lost = EngineDeadError(f"it cannot be restored: {error}")
            dead = error if isinstance(error, EngineDeadError) else lost
            self.die(dead)
            raise dead from error
        else:
            self.is_suspect, self.wrong = False, None
            self.poll()
            if self.good is not None and self.is_reachable:
                self.prove_running(self.good.directory)

    def test_reload(self) -> Proof | None:
        """Have it read its start weights again and prove that it still runs them; None if that cannot be asked."""
        try:
            return self._prover.test_reload()
        except UnprovenError as error:
            self._mark_wrong(error)
            raise
        except LoadFailedError:
            self.restore()
            raise

    def prove_running(self, weights: WeightDirectory | WeightTensors) -> None:
        """Have it prove a version that it says it runs; if it cannot, it is wrong until another version is loaded."""
        try:
            if self._prover.can_prove(weights):
                self.unproven.begin(weights.label)
            self.is_proven = self._prover.prove(weights) is not None
            self.unproven.end(is_proven=True)
        except EngineUnreachableError as error:
            self.unproven.end(is_proven=False)
            self.lose(error)
        except LoadFailedError as error:
            self.unproven.end(is_proven=False)
            self._mark_wrong(error)

    def load_received(self, weights: WeightTensors, load: Callable[[], None]) -> None:
        """Have it load weights by another way than from files, and prove them: it works on them before its answer."""
        if self._prover.can_prove(weights):
            self.unproven.begin(weights.label)
        try:
            load()
        except BaseException as error:
            self.unproven.end(is_proven=isinstance(error, UntouchedError))  # then nothing worked on them
            raise
        self.prove_running(weights)
        if self.wrong is not None:
            raise self.wrong

    def _leave_unproven(self, error: UnprovenError) -> None:
        """Go back to the last good version; without one it stays as it is, and is given no work."""
        if self.good is not None:
            self.restore()
            return
        self.unproven.end(is_proven=False)
        self.poll()
        self._mark_wrong(error)

    def _mark_wrong(self, error: LoadFailedError) -> None:
        self.wrong, self.reason, self.is_proven, self.applied = error, str(error), False, None

    def _settle(self, running: Running) -> None:
        """Note that it runs whole weights, and which ones."""
        self.is_suspect, self.wrong = False, None
        self._update(running)

    def _update(self, running: Running) -> None:
        if self._lost_in is not None:
            has_restarted = running.label is None and not running.paused
            self.died_loading, self._lost_in = self._lost_in if has_restarted else None, None
        if self.dead is not None and running.label != self.label:
            self.dead = None  # it was restarted
        if running.label != self.label:
            self.wrong, self.is_proven = None, False
        self.label, self.reason, self.is_reachable = running.label, "", True
        is_good = self.dead is None and self.wrong is None
        self.applied = self._versions.pair_of_label(running.label) if is_good else None
        self.is_suspect = self.is_suspect or running.paused
        self._next, self._pause = self._clock.monotonic() + self._every, _SOONEST

    def _require_fit(self, directory: WeightDirectory) -> None:
        if directory.version.kind != _WHOLE or not directory.tensors:
            return
        if held := self._hook.tensors() or self._reference:
            require_fit(compare(held, {}, directory.tensors, cast=False), "it does not fit the engine")


def _require_confirmed(directory: WeightDirectory, running: Running) -> None:
    if running.label != directory.label:
        raise LoadFailedError(
            f"the engine was given {directory.label} and says that it runs {running.label}",
            hint="an engine must report the whole label that it was given",
        )
    if running.paused:
        raise LoadFailedError(f"the engine was given {directory.label} and takes no work")


def _interrupted(error: EngineUnreachableError) -> InterruptedLoadError:
    return InterruptedLoadError(f"its connection was lost during load: {error}", hint=error.hint)


def _load_failure(what: str, error: Exception) -> LoadFailedError | ConfigError:
    if isinstance(error, LoadFailedError | ConfigError):
        return error
    if isinstance(error, EngineUnreachableError):
        return LoadFailedError(f"the engine went away during {what}: {error}", hint=error.hint)
    if isinstance(error, SyncdError):
        return LoadFailedError(error.message, path=error.path, hint=error.hint)
    # A hook may be the user's own code.
    return LoadFailedError(f"{what} failed: {type(error).__name__}: {error}")
