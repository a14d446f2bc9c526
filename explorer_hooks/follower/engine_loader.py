"""Loads versions into one engine: polls what it runs, loads what is due, and restores it if that fails."""

import contextlib
from collections.abc import Callable

from explorer_hooks.follower.gate import Gates
from explorer_hooks.follower.load_results import NOTICED, InterruptedLoadError, LoadResults
from explorer_hooks.follower.policy import FollowOptions, TurnOutcome
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.running_engine import WHOLE, EngineStatus, RunningEngine
from explorer_hooks.follower.start_checks import StartChecks, UnfitEngineError
from explorer_hooks.follower.versions import Fetcher, KnownVersions
from explorer_hooks.hook import ChangesHook, Hook, Running, UntouchedError
from explorer_hooks.proof.judgement import UnprovenError
from explorer_hooks.proof.prover import Prover
from syncd.client.client import Client
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
    UsageError,
)
from syncd.protocol.engine_state import EngineState
from syncd.protocol.rolling import AtGate
from syncd.protocol.version import Pair, Version, label_of
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.files.leased_directory import HeldDirectory, LoadTimings
from syncd.transports.tensors import compare, require_fit


class EngineLoader:
    def __init__(
        self,
        hook: Hook,
        versions: KnownVersions,
        fetcher: Fetcher,
        reporter: Reporter,
        prover: Prover,
        client: Client,
        options: FollowOptions,
        gates: Gates,
    ) -> None:
        self._hook, self._versions, self._fetcher, self._reporter = hook, versions, fetcher, reporter
        self._prover, self._clock, self._gates = prover, client.clock, gates
        self._prove_every = options.prove_every
        self.status = EngineStatus(client.clock, options.check_every, versions.pair_of_label)
        self.results = LoadResults(self.status, versions, reporter, prover, client.clock, options)
        self._engine = RunningEngine(hook, self.status, fetcher, prover, client.clock)
        self._checks = StartChecks(self._engine, prover, self.results, reporter, client.job, options)
        # The version that was loaded last: the engine should run it unless a newer one is due.
        self.position: Pair | None = None
        # The version that is fetched and waits for a gate, and how long that took.
        self._waiting: tuple[HeldDirectory, LoadTimings] | None = None
        self._is_polled = False

    @property
    def needs_load(self) -> bool:
        return self.status.is_suspect or self.status.applied != self.position

    @property
    def can_restore(self) -> bool:
        return self.status.wrong is None and (self._engine.good is not None or self.status.is_suspect)

    def running(self) -> Running:
        return self._engine.running()

    def poll(self) -> None:
        status = self.status
        before, was_reachable = status.applied, status.is_reachable
        self._engine.ask()
        if not status.is_reachable:
            if was_reachable or not self._is_polled:
                self._reporter.event("warning", "engine_connection_failed", reason=status.reason)
        elif not was_reachable or status.applied != before:
            self._accept_running()
        else:
            self._checks.calibrate()
            self._prove_again()
        self._is_polled = True
        self.results.publish()

    def waits_for(self, pair: Pair) -> bool:
        """Return whether a version is fetched and no gate has admitted it yet."""
        is_fetched = self._waiting is not None and self._waiting[0].pair == pair
        return is_fetched and not self._gates.admits(pair, self.status.applied)

    def stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[0].close()
            self._leave_gate()
            self.results.publish()

    def load(self, wanted: Version | int, *, at_once: bool = False) -> TurnOutcome:
        """Load a version, and report the result; `at_once`: without waiting for a gate."""
        timings = LoadTimings(self._clock)
        pair = wanted.pair if isinstance(wanted, Version) else self._pair_of(wanted)
        if self._waiting is not None and self._waiting[0].pair != pair:
            self.stop_waiting()
        if isinstance(wanted, Version):
            self._versions.note_wanted(wanted)
        if isinstance(wanted, Version) and wanted.published_at:
            timings[NOTICED] = round(max(self._clock.time() - wanted.published_at, 0.0), 6)
        self._checks.calibrate()
        self._reporter.publish(EngineState.LOADING, label_of(pair), now=False)
        try:
            held = self._fetch_and_load(wanted, timings, at_once=at_once)
        except (UsageError, ConfigError):
            raise
        except UnfitEngineError as error:
            self._leave_gate()
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
        self._engine.keep(held)
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
            self._engine.prove(weights)
            if self.status.wrong is not None:
                raise self.status.wrong
        finally:
            self.results.publish()

    def adopt(self, pair: Pair) -> None:
        """Accept a version that reached the engine by another way; its files will restore it."""
        self.position = pair
        self.results.failed.clear()
        self._engine.keep_running(pair)
        self.poll()

    def recover(self) -> None:
        """Restore the engine; without a good version the next one is loaded into it."""
        if self._engine.good is not None:
            self.restore()
            return
        self.status.is_suspect = True
        self._engine.ask()
        self.results.publish()

    def restore(self) -> None:
        status = self.status
        with contextlib.suppress(EngineDeadError):  # the engine's status says it
            self._engine.roll_back()
        good = self._engine.good
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
        self._engine.release()
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
            self._reporter.event("warning", "copy_load_failed", reason=str(error))
        return self._try(wanted, timings, at_once=at_once)  # the copy on this host failed: load the files

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
            self._checks.examine_adapters(directory)
            self.results.publish_loading(held)
            self._load_directory(directory, timings)
            undo.pop_all()
            return held

    def _fetched(self, wanted: Version | int, timings: LoadTimings) -> HeldDirectory:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return self._fetcher.fetch(wanted, timings, can_go_back=self._engine.good is not None)
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
        if directory.version.kind != WHOLE or not directory.tensors:
            return
        first = self._engine.first_whole
        if held := self._hook.tensors() or (first and first.tensors):
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
            self._engine.leave_unproven(error)
            raise
        except EngineUnreachableError as error:
            self._regain(directory, before, error)
            return
        except Exception as error:
            self._engine.roll_back()
            raise _load_failure("load", error) from error
        except BaseException:
            self._engine.roll_back()
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
                self._prover.begin(self._engine.good_if_running(), directory)
        with timings.part("load"):
            self._hook.load(directory)
        if can_prove and is_held:
            self._prove(directory, timings)
        if can_prove and not is_held:
            # It works before its answer, which may show other weights.
            self.status.unproven.begin(directory.label)
        with timings.part("load"):
            self._hook.commit(directory)
        if can_prove and not is_held:
            self._prove(directory, timings)
        return can_prove

    def _prove(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        with timings.part("prove"):
            self._prover.prove(directory)

    def _fill_seconds(self, held: HeldDirectory) -> float | None:
        """Return what reading a version and filling a model took; None of a copy or another engine."""
        if held.source != "files" or not isinstance(self._hook, ChangesHook):
            return None
        return self._hook.fill_seconds()

    # --- a load that fails ----------------------------------------------------------------------------------------

    def _regain(self, directory: WeightDirectory, before: str | None, error: EngineUnreachableError) -> None:
        """Return if an engine whose connection was lost in a load has loaded the version all the same."""
        try:
            running = self._engine.ask_again()
        except EngineUnreachableError as lost:
            self.status.lose_loading(directory.version.pair, lost)
            raise _interrupted(error) from error
        if running == Running(directory.label, unproven=running.unproven):
            self._accept_loaded(directory, running, error)
            return
        has_restarted = before is not None and running.label is None and not running.paused
        if has_restarted or self._engine.good is not None:
            self._engine.roll_back()
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
        self._engine.prove(directory)
        if self.status.wrong is not None:
            wrong = self.status.wrong
            if self._engine.good is not None:
                self._engine.roll_back()
            raise wrong
        if not self.status.is_reachable:
            raise _interrupted(error) from error

    # --- what it runs ---------------------------------------------------------------------------------------------

    def _prove_again(self) -> None:
        """Have it prove what it runs once more, if it was long ago: somebody else may have replaced its weights."""
        good = self._engine.good_if_running() if self.status.is_proven else None
        age = self._clock.monotonic() - self._prover.asked_at
        if good is None or not 0 < self._prove_every <= age:
            return
        self._engine.prove(good, again=True)
        if (wrong := self.status.wrong) is not None:
            fields = {"version": good.label, "reason": str(wrong), "again": True, "hint": wrong.hint}
            self._reporter.event("warning", "proof_failed", **fields)

    def _accept_running(self) -> None:
        """Report what an engine runs that is polled for the first time or came back, and keep its files."""
        status = self.status
        died, status.died_loading = status.died_loading, None
        if died is not None:
            self.results.note_death(died)
        self._checks.begin()
        level = "info" if status.is_known else "warning"
        fields = {"known": status.is_known, "version": status.label, "suspect": status.is_suspect}
        self._reporter.event(level, "engine_runs", **fields)
        applied = status.applied
        if applied is not None and (self.position is None or self.results.is_troubled(applied)):
            self.position = applied
            self.results.clear_trouble()
            self._engine.keep_running(applied)

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
