"""Loads versions into one engine: polls what it runs, loads what is due, and restores it if that fails."""

import contextlib
from collections.abc import Callable

from explorer_hooks.follower.engine_status import EngineStatus
from explorer_hooks.follower.examination import Examination
from explorer_hooks.follower.gate import Gates
from explorer_hooks.follower.load_results import NOTICED, InterruptedLoadError, LoadResults, figures_of
from explorer_hooks.follower.policy import FollowOptions, TurnOutcome
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.versions import Fetcher, KnownVersions
from explorer_hooks.hook import ChangesHook, Hook, ProbingHook, Running, UntouchedError
from explorer_hooks.proof.exam import LABEL, Exam
from explorer_hooks.proof.judgement import UnprovenError, other_start
from explorer_hooks.proof.prover import Prover
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
    UsageError,
)
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineState, Proof
from syncd.protocol.rolling import AtGate
from syncd.protocol.version import Pair, Version, label_of
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.files.leased_directory import HeldDirectory, LoadTimings
from syncd.transports.tensors import Tensors, compare, require_fit

_WHOLE, _ADAPTER = "weights", "lora"
_ASKS = 4
_ASK_PAUSE = 0.1
"""How often an engine is asked at once what it runs if its connection was lost in a load, and seconds in between."""


class UnfitEngineError(SyncdError):
    """The engine's way of loading does not reach every tensor, so it gets no version."""

    code = "unfit_engine"


class EngineLoader:
    """Loads versions into the engine behind a hook, and reports what it runs."""

    def __init__(
        self,
        hook: Hook,
        versions: KnownVersions,
        fetcher: Fetcher,
        reporter: Reporter,
        prover: Prover,
        examination: Examination,
        clock: Clock,
        options: FollowOptions,
        gates: Gates | None = None,
    ) -> None:
        self._gates = gates or Gates()
        self._waiting: tuple[HeldDirectory, LoadTimings] | None = None
        """The version that is fetched and waits for a gate, and how long that took."""
        self._hook, self._versions, self._fetcher, self._reporter = hook, versions, fetcher, reporter
        self._prover, self._examination = prover, examination
        self._clock, self._tests_reload = clock, options.reload_test
        self._prove_every = options.prove_every
        self._is_own = isinstance(hook, ProbingHook) and hook.is_own
        self.status = EngineStatus(clock, options.check_every, versions.pair_of_label)
        self.results = LoadResults(self.status, versions, reporter, prover, examination, clock, options)
        self.position: Pair | None = None
        """The version that was loaded last: the engine should run it unless a newer one is due."""
        self._good: HeldDirectory | None = None
        """The last good version, which a failed load restores."""
        self._reference: Tensors | None = None
        """The tensors of the first version that was applied: each further version has the same ones."""
        self._is_polled = self._is_calibrated = False

    @property
    def needs_load(self) -> bool:
        """Return whether the engine does not run what was loaded last, or may be half loaded."""
        return self.status.is_suspect or self.status.applied != self.position

    @property
    def can_restore(self) -> bool:
        """Return whether the engine can be put back on what it ran."""
        return self.status.wrong is None and (self._good is not None or self.status.is_suspect)

    def running(self) -> Running:
        """Return what the engine says that it runs. Any thread may call this."""
        return self._hook.current_version()

    def poll(self) -> None:
        """Read from the engine what it runs, and publish that."""
        status = self.status
        before, was_reachable = status.applied, status.is_reachable
        self._ask()
        if not status.is_reachable:
            if was_reachable or not self._is_polled:
                self._reporter.event("warning", "engine_connection_failed", reason=status.reason)
        elif not was_reachable or status.applied != before:
            self._accept_running()
        else:
            self._calibrate()
            self._prove_again()
        self._is_polled = True
        self.results.publish()

    def waits_for(self, pair: Pair) -> bool:
        """Return whether a version is fetched and no gate has admitted it yet."""
        is_fetched = self._waiting is not None and self._waiting[0].pair == pair
        return is_fetched and not self._gates.admits(pair, self.status.applied)

    def stop_waiting(self) -> None:
        """Give up the version that waits for a gate, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[0].close()
            self._leave_gate()
            self.results.publish()

    def load(self, wanted: Version | int, *, at_once: bool = False) -> TurnOutcome:
        """Load a version, and report the result.

        Args:
            at_once: Whether it waits for no gate.
        """
        timings = LoadTimings(self._clock)
        pair = wanted.pair if isinstance(wanted, Version) else self._pair_of(wanted)
        if self._waiting is not None and self._waiting[0].pair != pair:
            self.stop_waiting()
        if isinstance(wanted, Version):
            self._versions.note_wanted(wanted)
        if isinstance(wanted, Version) and wanted.published_at:
            timings[NOTICED] = round(max(self._clock.time() - wanted.published_at, 0.0), 6)
        self._calibrate()
        self._reporter.publish(EngineState.LOADING, label_of(pair), now=False)
        try:
            held = self._fetch_and_load(wanted, timings, at_once=at_once)
        except (UsageError, ConfigError):
            raise
        except UnfitEngineError as error:
            self.results.publish()
            return TurnOutcome("failed", pair, str(error))  # the version is as good as any
        except (SyncdError, OSError) as error:
            self._leave_gate()
            return self.results.report_failure(pair, error)
        if held is None:
            return TurnOutcome("nothing", pair, "it is fetched, and waits for its turn")
        self._leave_gate()
        self.position = held.pair
        self.results.publish_applied(held, timings, self._fill_seconds(held))
        self._keep(held)
        self._fetcher.sweep()
        return self.results.report_applied(held, timings)

    def load_received(self, weights: WeightTensors, load: Callable[[], None]) -> None:
        """Have the engine load weights by another way than from files, and prove them: it works on them meanwhile."""
        unproven = self.status.unproven
        try:
            if self._prover.can_prove(weights):
                unproven.begin(weights.label)
            try:
                load()
            except BaseException as error:
                unproven.end(is_proven=isinstance(error, UntouchedError))  # then nothing worked on them
                raise
            self._prove_running(weights)
            if self.status.wrong is not None:
                raise self.status.wrong
        finally:
            self.results.publish()

    def adopt(self, pair: Pair) -> None:
        """Accept a version that reached the engine by another way; its files will restore it."""
        self.position = pair
        self.results.failed.clear()
        self._keep_running(pair)
        self.poll()

    def recover(self) -> None:
        """Restore the engine; without a good version the next one is loaded into it."""
        if self._good is not None:
            self.restore()
            return
        self.status.is_suspect = True
        self._ask()
        self.results.publish()

    def restore(self) -> None:
        status = self.status
        with contextlib.suppress(EngineDeadError):  # the engine's status says it
            self._roll_back()
        good = self._good
        is_back = not status.is_suspect and (good is None or status.applied == good.pair)
        if status.is_reachable and status.dead is None and is_back:
            self.position = status.applied
            shown = label_of(good.pair) if good else None
            self._reporter.event("info", "engine_restored", version=shown)
        elif status.is_reachable and good is not None and status.dead is None and status.wrong is None:
            status.die(EngineDeadError(f"the engine cannot be restored to {good.directory.label}"))
        self.results.publish()

    def close(self) -> None:
        """Remove the ready file, give up the last good version and close the hook; the engine keeps running."""
        self._reporter.ready.show(None)
        if self._waiting is not None:
            self._waiting[0].close()
        self._release()
        self._hook.close()

    # --- one load -------------------------------------------------------------------------------------------------

    def _fetch_and_load(
        self, wanted: Version | int, timings: LoadTimings, *, at_once: bool
    ) -> HeldDirectory | None:
        """Return the version that was loaded, None if a gate does not admit it yet."""
        try:
            return self._try(wanted, timings, at_once=at_once)
        except (LoadFailedError, RefusedError) as error:
            if not self._fetcher.reject():
                raise
            self._reporter.event("warning", "memory_load_failed", reason=str(error))
        return self._try(wanted, timings, at_once=at_once)  # the copy in memory failed: load the files

    def _try(self, wanted: Version | int, timings: LoadTimings, *, at_once: bool) -> HeldDirectory | None:
        with contextlib.ExitStack() as undo:
            held = self._fetched(wanted, timings)
            undo.callback(held.close)
            directory = held.directory
            self._versions.add_label(directory.label)
            if not at_once and not self._gates.admits(held.pair, self.status.applied):
                self._wait_at_gate(held, timings)
                undo.pop_all()
                return None
            if not self._gates.is_open:
                self.results.gate = AtGate(*held.pair, passed=True, since=self._clock.time())
            self._prepare(directory, timings)
            self._examine_adapters(directory)
            self.results.publish_loading(held)
            self._load_directory(directory, timings)
            undo.pop_all()
            return held

    def _fetched(self, wanted: Version | int, timings: LoadTimings) -> HeldDirectory:
        """Return a version's files, which are fetched already if it has waited for a gate."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return self._fetcher.fetch(wanted, timings)
        held, spent = waiting
        timings.update(spent)
        return held

    def _wait_at_gate(self, held: HeldDirectory, timings: LoadTimings) -> None:
        self._waiting = held, timings
        self.results.gate = AtGate(*held.pair, passed=False, since=self._clock.time())
        self.results.publish()
        self._reporter.event("debug", "load_waits", version=label_of(held.pair))

    def _leave_gate(self) -> None:
        if self._waiting is None:
            self.results.gate = None

    def _prepare(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        with timings.part("prepare"):
            try:
                self._require_fit(directory)
                self._hook.prepare(directory)
            except SyncdError:
                raise
            except Exception as error:
                raise _load_failure("prepare", error) from error

    def _require_fit(self, directory: WeightDirectory) -> None:
        if directory.version.kind != _WHOLE or not directory.tensors:
            return
        if held := self._hook.tensors() or self._reference:
            require_fit(compare(held, {}, directory.tensors, cast=False), "it does not fit the engine")

    def _load_directory(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        """Load a version and have the engine prove and confirm it; if anything fails, the engine is restored."""
        before, status = self.status.label, self.status
        try:
            is_proven = self._load_and_prove(directory, timings)
            with timings.part("confirm"):
                running = self.running()
                _require_confirmed(directory, running)
        except EngineDeadError as error:
            status.die(error)
            raise
        except UnprovenError as error:
            self._leave_unproven(error)
            raise
        except EngineUnreachableError as error:
            self._regain(directory, before, error)
            return
        except Exception as error:
            self._roll_back()
            raise _load_failure("load", error) from error
        except BaseException:
            self._roll_back()
            raise
        status.unproven.end(is_proven=True)
        status.loaded(running)
        status.is_proven = is_proven
        with contextlib.suppress(SyncdError):
            self._hook.settle(directory)

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
            self.status.unproven.begin(
                directory.label
            )  # it works before its answer, which may show other weights
        with timings.part("load"):
            self._hook.commit(directory)
        if can_prove and not is_held:
            self._prove(directory, timings)
        return can_prove

    def _running_version(self) -> WeightDirectory | None:
        """Return the version that it runs, None if its files are not on this host."""
        good, status = self._good.directory if self._good else None, self.status
        return good if good is not None and good.label == status.label and not status.is_suspect else None

    def _prove(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        with timings.part("prove"):
            self._prover.prove(directory)

    def _fill_seconds(self, held: HeldDirectory) -> float | None:
        """Return what reading a version and filling a model took; None of a copy or another engine."""
        if held.source != "files" or not isinstance(self._hook, ChangesHook):
            return None
        return self._hook.fill_seconds()

    # --- a load that fails ----------------------------------------------------------------------------------------

    def _roll_back(self) -> None:
        """Put the engine back on the last good version, and read from it what it runs then.

        An engine that went away meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version is damaged, or was removed while this process was stopped for too long: the newest version may
        still save it.
        """
        status = self.status
        status.is_suspect = True
        status.unproven.end(is_proven=False)
        if self._good is not None and not self._good.is_usable():
            self._release()
            self._ask()
            return
        try:
            self._hook.abort(self._good.directory if self._good else None)
        except EngineUnreachableError as error:
            status.lose(error)
        except Exception as error:
            lost = EngineDeadError(f"it cannot be restored: {error}")
            dead = error if isinstance(error, EngineDeadError) else lost
            status.die(dead)
            raise dead from error
        else:
            status.is_suspect, status.wrong = False, None
            self._ask()
            if self._good is not None and status.is_reachable:
                self._prove_running(self._good.directory)

    def _regain(self, directory: WeightDirectory, before: str | None, error: EngineUnreachableError) -> None:
        """Return if an engine whose connection was lost in a load has loaded the version all the same."""
        try:
            running = self._ask_again()
        except EngineUnreachableError as lost:
            self.status.lose_loading(directory.version.pair, lost)
            raise _interrupted(error) from error
        if running == Running(directory.label, unproven=running.unproven):
            self._accept_loaded(directory, running, error)
            return
        has_restarted = before is not None and running.label is None and not running.paused
        if has_restarted or self._good is not None:
            self._roll_back()
        else:
            self.status.is_suspect = True
            self.status.unproven.end(is_proven=False)
            self.status.answered(running)
        raise (_load_failure("load", error) if has_restarted else _interrupted(error)) from error

    def _accept_loaded(
        self, directory: WeightDirectory, running: Running, error: EngineUnreachableError
    ) -> None:
        """Accept a version that it says it runs after its connection was lost, once it has proven it."""
        self.status.loaded(running)
        self._prove_running(directory)
        if self.status.wrong is not None:
            wrong = self.status.wrong
            if self._good is not None:
                self._roll_back()
            raise wrong
        if not self.status.is_reachable:
            raise _interrupted(error) from error

    def _leave_unproven(self, error: UnprovenError) -> None:
        """Go back to the last good version; without one it stays as it is, and is given no work."""
        if self._good is not None:
            self._roll_back()
            return
        self.status.unproven.end(is_proven=False)
        self._ask()
        self.status.mark_wrong(error)

    # --- what it runs ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        try:
            running = self.running()
        except EngineUnreachableError as error:
            self.status.lose(error)
        else:
            self.status.answered(running)

    def _ask_again(self) -> Running:
        """Return what it says that it runs, asked a few times if its connection is lost again."""
        for _ in range(_ASKS - 1):
            with contextlib.suppress(EngineUnreachableError):
                return self.running()
            self._clock.sleep(_ASK_PAUSE)
        return self.running()

    def _prove_running(self, weights: WeightDirectory | WeightTensors, *, again: bool = False) -> None:
        """Have it prove a version that it says it runs; if it cannot, it is wrong until another version is loaded."""
        status = self.status
        try:
            if self._prover.can_prove(weights):
                status.unproven.begin(weights.label)
            status.is_proven = self._prover.prove(weights, again=again) is not None
            status.unproven.end(is_proven=True)
        except EngineUnreachableError as error:
            status.unproven.end(is_proven=False)
            status.lose(error)
        except LoadFailedError as error:
            status.unproven.end(is_proven=False)
            status.mark_wrong(error)

    def _prove_again(self) -> None:
        """Have it prove what it runs once more, if it was long ago: somebody else may have replaced its weights."""
        good = self._running_version() if self.status.is_proven else None
        age = self._clock.monotonic() - self._prover.asked_at
        if good is None or not 0 < self._prove_every <= age:
            return
        self._prove_running(good, again=True)
        if (wrong := self.status.wrong) is not None:
            fields = {"version": good.label, "reason": str(wrong), "again": True, "hint": wrong.hint}
            self._reporter.event("warning", "proof_failed", **fields)

    def _recall(self) -> None:
        with contextlib.suppress(SyncdError, OSError):
            self._prover.recall()
            self._examination.recall()

    def _accept_running(self) -> None:
        """Report what an engine runs that is polled for the first time or came back, and keep its files."""
        status = self.status
        died, status.died_loading = status.died_loading, None
        if died is not None:
            self.results.note_death(died)
        self._is_calibrated = False
        self._prover.forget_engine()
        self._forget_exam()
        if status.label == LABEL:
            self._end_exam()
        self._examine_and_calibrate()
        if status.label is not None:
            self._recall()
        level = "info" if status.is_known else "warning"
        fields = {"known": status.is_known, "version": status.label, "suspect": status.is_suspect}
        self._reporter.event(level, "engine_runs", **fields)
        applied = status.applied
        if applied is not None and (self.position is None or self.results.is_troubled(applied)):
            self.position = applied
            self.results.clear_trouble()
            self._keep_running(applied)

    def _keep_running(self, pair: Pair) -> None:
        """Keep the files of the version that the engine runs already."""
        held = self._fetcher.fetch_running(pair)
        if held is not None:
            self._keep(held)
            self._prove_running(held.directory)

    def _keep(self, held: HeldDirectory) -> None:
        held.keep_durable()
        before, self._good = self._good, held
        directory = held.directory
        if self._reference is None and directory.version.kind == _WHOLE and directory.tensors:
            self._reference = directory.tensors
        if before is not None and before is not held:
            before.close()

    def _release(self) -> None:
        good, self._good = self._good, None
        if good is not None:
            good.close()

    def _forget_exam(self) -> None:
        if self.status.label is None or self.status.label == LABEL:
            self._examination.forget()
            self.status.unfit = None

    def _end_exam(self) -> None:
        """Put an engine back on its start weights that another follower has left in an exam."""
        try:
            if isinstance(self._hook, ProbingHook) and self._hook.end_exam():
                self.status.is_suspect = False
                self._reporter.event(
                    "warning", "exam_ended", reason="its follower ended while it was examined"
                )
        except EngineUnreachableError as error:
            self.status.lose(error)
            return
        except SyncdError as error:
            self._reporter.event("error", "exam_failed", reason=str(error), hint=error.hint)
        self._ask()

    def _examine_and_calibrate(self) -> None:
        """Examine an engine on its start weights, and compare it with the trainer before and afterwards."""
        if not self.status.is_reachable or self.status.label is not None:
            return
        with self._examination.opened() as exam:
            self._calibrate(is_tested=exam is not None)
            if exam is not None:
                self._examine(*exam)

    def _examine_adapters(self, directory: WeightDirectory) -> None:
        """Examine an engine of adapters before the first one; one that fails gets neither this nor another."""
        if directory.version.kind != _ADAPTER:
            return
        with self._examination.opened(directory) as exam:
            if exam is not None:
                self._examine(*exam)
        if self.status.unfit is not None:
            raise UnfitEngineError(self.status.unfit.message, hint=self.status.unfit.hint)

    def _examine(self, exam: Exam, copy: WeightDirectory) -> None:
        """Have it load the exam's copy, which nobody is answered from, and put it back."""
        if self.status.start_problem is not None:
            return
        try:
            if not self._examination.is_on_start(exam) or not self._examination.can_take(copy):
                return
        except EngineUnreachableError as error:
            self._examination.lose(error)
            self.status.lose(error)
            return
        except SyncdError as error:
            self._reporter.event("warning", "exam_left_out", reason=str(error))
            return
        self.status.is_examined = True
        self.results.publish()
        try:
            self._examination.take(exam, copy)
        except EngineUnreachableError as error:
            self._examination.lose(error)
            self.status.lose(error)
        except SyncdError as error:
            self.status.unfit = LoadFailedError(error.message, hint=error.hint)
            self._reporter.event("error", "exam_failed", reason=str(error), hint=error.hint)
        finally:
            self._read_again(self._prover.end_exam)
            self.status.is_examined = False
        self._ask()

    def _calibrate(self, *, is_tested: bool = False) -> None:
        """Compare the engine with the trainer while it runs its start weights, once there is a baseline."""
        status = self.status
        if self._is_calibrated or not status.is_reachable or status.label is not None:
            return
        try:
            proof = self._prover.calibrate()
        except ConfigError:
            raise
        except SyncdError as error:
            self._reporter.event("warning", "calibration_failed", reason=str(error), hint=error.hint)
            self._is_calibrated = True
            return
        if proof is not None:
            self._is_calibrated = True
            status.start_problem = None if proof.is_proven else other_start(proof)
            name = "engine_calibrated" if proof.is_proven else "start_model_differs"
            self._reporter.event("info" if proof.is_proven else "warning", name, **figures_of(proof))
            if self._tests_reload and not is_tested and not self._is_own:
                self._read_again(self._prover.test_reload)

    def _read_again(self, read: Callable[[], Proof | None]) -> None:
        """Have the engine read its start weights again: that it cannot do so shows before a version needs it."""
        try:
            proof = self._reread(read)
        except ConfigError:
            raise
        except EngineUnreachableError as error:
            self.status.lose(error)
        except SyncdError as error:
            self._reporter.event("error", "reload_test_failed", reason=str(error), hint=error.hint)
        else:
            if proof is not None:
                self._reporter.event("info", "reload_tested", **figures_of(proof))

    def _reread(self, read: Callable[[], Proof | None]) -> Proof | None:
        """Return the proof that it still runs its start weights; None if that cannot be asked.

        An engine that does not prove them is wrong until a version is loaded that it proves.
        """
        try:
            return read()
        except UnprovenError as error:
            self.status.mark_wrong(error)
            raise
        except LoadFailedError:
            self._roll_back()
            raise

    def _pair_of(self, step: int) -> Pair:
        newest = self._versions.newest
        return (newest.generation if newest else 0), step


def _require_confirmed(directory: WeightDirectory, running: Running) -> None:
    if running.label != directory.label:
        raise LoadFailedError(
            f"the engine was given {directory.label} and reports {running.label}",
            hint="an engine must report the whole label that it was given",
        )
    if running.paused:
        raise LoadFailedError(f"the engine loaded {directory.label} and stayed paused")


def _interrupted(error: EngineUnreachableError) -> InterruptedLoadError:
    return InterruptedLoadError(f"its connection was lost during load: {error}", hint=error.hint)


def _load_failure(what: str, error: Exception) -> LoadFailedError | ConfigError:
    if isinstance(error, LoadFailedError | ConfigError):
        return error
    if isinstance(error, EngineUnreachableError):
        return LoadFailedError(f"the engine stopped answering during {what}: {error}", hint=error.hint)
    if isinstance(error, SyncdError):
        return LoadFailedError(error.message, path=error.path, hint=error.hint)
    # A hook may be the user's own code.
    return LoadFailedError(f"{what} failed: {type(error).__name__}: {error}")
