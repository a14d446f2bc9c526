"""Drives one engine: polls what it runs, loads what is due, and reports the result."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from explorer_hooks.follower.engine import Engine, InterruptedLoadError
from explorer_hooks.follower.policy import FollowOptions, TurnOutcome, is_within
from explorer_hooks.follower.proof import UnprovenError, has_grown, other_start
from explorer_hooks.follower.prover import Prover
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.versions import FailedVersions, Fetcher, KnownVersions
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    StorageError,
    SyncdError,
    TryAgainError,
    UsageError,
)
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineState, GivenUp, Proof
from syncd.protocol.version import Pair, Version, label_of
from syncd.transports.base import WeightTensors
from syncd.transports.files.directory import HeldDirectory, LoadTimings

_NOTICED = "noticed"
"""The age of a version when it was read: a part of the timings, but not of the load."""

_MAY_PASS = (InterruptedLoadError, StorageError, OSError)
"""What may be the fault of a network, a mount or a full disk: it says nothing about the version."""


class EngineDriver:
    """Loads versions into one engine and reports what it runs.

    Args:
        versions: The versions of the job.
        fetcher: Fetches the directories of versions.
        prover: Has the engine prove what it runs.
    """

    def __init__(
        self,
        engine: Engine,
        versions: KnownVersions,
        fetcher: Fetcher,
        reporter: Reporter,
        prover: Prover,
        clock: Clock,
        options: FollowOptions,
    ) -> None:
        self._engine, self._versions, self._fetcher, self._reporter = engine, versions, fetcher, reporter
        self._prover = prover
        self._clock, self._max_lag, self._tests_reload = clock, options.max_lag, options.reload_test
        self.failed = FailedVersions(clock, options.retries, options.backoff)
        self.position: Pair | None = None
        """The version that was loaded last: the engine should run it unless a newer one is due."""
        self._bytes = 0
        self._trouble: GivenUp | None = None
        """Why the newest version that was tried does not run, None if it does."""
        self._troubled: Pair | None = None
        """That version."""
        self._is_polled = self._is_calibrated = False

    @property
    def needs_load(self) -> bool:
        """Return whether the engine does not run what was loaded last, or may be half loaded."""
        return self._engine.is_suspect or self._engine.applied != self.position

    def poll(self) -> None:
        """Read from the engine what it runs, and publish that."""
        engine = self._engine
        before, was_reachable = engine.applied, engine.is_reachable
        engine.poll()
        if not engine.is_reachable:
            if was_reachable or not self._is_polled:
                self._reporter.event("warning", "engine_connection_failed", reason=engine.reason)
        elif not was_reachable or engine.applied != before:
            self._accept_running()
        else:
            self._calibrate()
        self._is_polled = True
        self._publish()

    def show_ready(self) -> None:
        """Update the ready file."""
        served = self._engine.applied if self._is_ready() else None
        self._reporter.ready.show(label_of(served) if served else None)

    def _is_ready(self) -> bool:
        engine = self._engine
        is_good = engine.is_reachable and not engine.is_suspect and engine.applied is not None
        return is_good and is_within(engine.applied, self._versions.pair, self._max_lag)

    def load(self, wanted: Version | int) -> TurnOutcome:
        """Load a version."""
        timings = LoadTimings(self._clock)
        pair = wanted.pair if isinstance(wanted, Version) else self._pair_of(wanted)
        if isinstance(wanted, Version) and wanted.published_at:
            timings[_NOTICED] = round(max(self._clock.time() - wanted.published_at, 0.0), 6)
        self._calibrate()
        self._reporter.publish(EngineState.LOADING, label_of(pair), now=False)
        try:
            held = self._fetch_and_load(wanted, timings)
        except (UsageError, ConfigError):
            raise
        except (SyncdError, OSError) as error:
            return self._report_failure(pair, error)
        return self._report_applied(held, timings)

    def adopt(self, pair: Pair) -> None:
        """Accept a version that reached the engine by another way; its files will restore it."""
        self.position = pair
        self.failed.clear()
        self._keep_running(pair)
        self.poll()

    def load_received(self, weights: WeightTensors, load: Callable[[], None]) -> None:
        """Have the engine load weights by another way than from files, and prove them, as `Follower` has it."""
        try:
            self._engine.load_received(weights, load)
        finally:
            self._publish()

    def recover(self) -> None:
        """Restore the engine; without a good version the next one is loaded into it."""
        if self._engine.good is not None:
            self.restore()
            return
        self._engine.is_suspect = True
        self._engine.poll()
        self._publish()

    def restore(self) -> None:
        """Put the engine back on the last good version."""
        engine = self._engine
        with contextlib.suppress(EngineDeadError):  # the engine's state says it
            engine.restore()
        good = engine.good
        is_back = not engine.is_suspect and (good is None or engine.applied == good.pair)
        if engine.is_reachable and engine.dead is None and is_back:
            self.position = engine.applied
            shown = label_of(good.pair) if good else None
            self._reporter.event("info", "engine_restored", version=shown)
        elif engine.is_reachable and good is not None and engine.dead is None and engine.wrong is None:
            engine.die(EngineDeadError(f"the engine cannot be restored to {good.directory.label}"))
        self._publish()

    def close(self) -> None:
        """Remove the ready file, and give up the last good version; the engine keeps running."""
        self._reporter.ready.show(None)
        self._engine.close()

    def _publish(self, more: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Publish the state that the engine is in now, and the version that it has confirmed, in one write."""
        engine, (state, reason) = self._engine, self._state()
        is_same = self._reporter.applied == engine.applied
        is_ready, proof = self._is_ready(), self._prover.last
        if not is_ready:
            self._reporter.ready.show(None)  # before the presence: writing that may take long
        self._reporter.publish(state, reason, now=is_same, more=more, ready=is_ready, proof=proof, **changes)
        if not is_same:
            self._reporter.confirm(engine.applied)
        self.show_ready()

    def _state(self) -> tuple[EngineState, str]:
        engine, trouble = self._engine, self._trouble
        if (found := engine.disorder()) is not None:
            return found
        if trouble is not None:
            return (EngineState.REFUSED if trouble.refused else EngineState.FAILED), trouble.reason
        if engine.applied is None:
            return EngineState.WAITING, ""
        return (EngineState.PROVEN if engine.is_proven else EngineState.LOADED), ""

    def _fetch_and_load(self, wanted: Version | int, timings: LoadTimings) -> HeldDirectory:
        try:
            return self._try(wanted, timings)
        except (LoadFailedError, RefusedError) as error:
            if not self._fetcher.reject():
                raise
            self._reporter.event("warning", "memory_load_failed", reason=str(error))
        return self._try(wanted, timings)  # the copy in memory failed: load the files

    def _try(self, wanted: Version | int, timings: LoadTimings) -> HeldDirectory:
        with contextlib.ExitStack() as undo:
            held = self._fetcher.fetch(wanted, timings)
            undo.callback(held.close)
            directory = held.directory
            self._versions.add_label(directory.label)
            self._engine.prepare(directory, timings)
            self._report_loading(held.pair)
            self._reporter.event("debug", "load_started", version=label_of(held.pair), path=directory.path)
            self._engine.load(directory, timings)
            undo.pop_all()
            return held

    def _report_loading(self, pair: Pair) -> None:
        """Report that the engine is not ready: it is about to change, and has yet to prove what it runs then."""
        self._reporter.ready.show(None)
        self._reporter.publish(EngineState.LOADING, label_of(pair), now=False, ready=False)

    def _report_applied(self, held: HeldDirectory, timings: LoadTimings) -> TurnOutcome:
        self.position, self._trouble, self._troubled = held.pair, None, None
        self._bytes += held.size
        self.failed.clear()
        seconds = round(sum(spent for part, spent in timings.items() if part != _NOTICED), 6)
        loaded = {"step": held.pair[1], "source": held.source, "seconds": seconds, **self._filled(held)}
        facts = {"staged": held.staged_at, "loaded": loaded, "timings": dict(timings), "bytes": self._bytes}
        self._publish(facts, loads=self._reporter.report.loads + 1, load_seconds=seconds)
        self._engine.keep(held)
        self._fetcher.sweep()
        version, is_proven = label_of(held.pair), self._engine.is_proven
        proof = self._prover.last if is_proven else None
        figures = _figures(proof) if proof else {}
        self._reporter.event(
            "info",
            "version_applied",
            version=version,
            proven=is_proven,
            source=held.source,
            **figures,
            **timings,
        )
        if proof and has_grown(proof):
            self._reporter.event("warning", "proof_difference_grew", version=version, **figures)
        return TurnOutcome("applied", held.pair, timings=dict(timings))

    def _filled(self, held: HeldDirectory) -> dict[str, float]:
        """Return what the trainer weighs where no copy was staged: how long reading and filling took."""
        filled = self._engine.fill_seconds() if held.source == "files" else None
        return {} if filled is None else {"filled": round(filled, 6)}

    def _report_failure(self, pair: Pair, error: SyncdError | OSError) -> TurnOutcome:
        reason, version = str(error), label_of(pair)
        event = {"version": version, "reason": reason}
        if isinstance(error, EngineUnreachableError):
            self._engine.lose(error)
            self._publish_event("warning", "engine_connection_failed", {"reason": reason})
            return TurnOutcome("unreachable", pair, reason)
        if isinstance(error, TryAgainError):
            self.failed.miss(pair)
            self._publish_event("info", "version_skipped", event)
            return TurnOutcome("gone", pair, reason)
        if isinstance(error, EngineDeadError):
            self._give_up(pair, reason)
            self._publish_event("error", "engine_died", event)
            raise error
        if isinstance(error, RefusedError):
            self._give_up(pair, reason, refused=True)
            self._publish_event("error", "load_refused", {**event, "hint": error.hint})
            return TurnOutcome("refused", pair, reason)
        is_answer = not isinstance(error, _MAY_PASS)
        again = self.failed.fail(pair) if is_answer else self.failed.interrupt(pair)
        self._note_trouble(pair, reason, is_given_up=not again)
        failure = {**event, "again": again, "hint": getattr(error, "hint", None)}
        if isinstance(error, UnprovenError):
            self._publish_event("warning", "proof_failed", {**failure, **_figures(error.proof)})
        else:
            self._publish_event("warning", "load_failed", failure)
        return TurnOutcome("failed", pair, reason)

    def _give_up(self, pair: Pair, reason: str, *, refused: bool = False) -> None:
        self.failed.give_up(pair)
        self._note_trouble(pair, reason, refused=refused)

    def _note_trouble(
        self, pair: Pair, reason: str, *, refused: bool = False, is_given_up: bool = True
    ) -> None:
        """Note why a version does not run, and that a load failed."""
        report, newest = self._reporter.report, self._versions.newest
        digest = newest.digest if newest is not None and newest.pair == pair else ""
        self._trouble, self._troubled = GivenUp(pair[1], digest, reason, refused), pair
        given_up = (*report.given_up, self._trouble) if is_given_up else report.given_up
        self._reporter.report = replace(report, failures=report.failures + 1, given_up=given_up)

    def _publish_event(self, level: str, name: str, event: Mapping[str, Any]) -> None:
        self._publish()
        self._reporter.event(level, name, **event)

    def _accept_running(self) -> None:
        """Report what an engine runs that is polled for the first time or came back, and keep its files."""
        engine = self._engine
        died, engine.died_loading = engine.died_loading, None
        if died is not None:
            again = self.failed.fail(died)
            self._note_trouble(died, "the engine ended while it loaded it", is_given_up=not again)
        self._is_calibrated = False
        self._prover.forget_engine()
        self._calibrate()
        level = "info" if engine.is_known else "warning"
        fields = {"known": engine.is_known, "version": engine.label, "suspect": engine.is_suspect}
        self._reporter.event(level, "engine_runs", **fields)
        has_arrived = engine.applied is not None and engine.applied == self._troubled
        if engine.applied is not None and (self.position is None or has_arrived):
            self.position, self._trouble, self._troubled = engine.applied, None, None
            self._keep_running(engine.applied)

    def _keep_running(self, pair: Pair) -> None:
        """Keep the files of the version that the engine runs already."""
        held = self._fetcher.fetch_running(pair)
        if held is not None:
            self._engine.keep(held)
            self._engine.prove_running(held.directory)

    def _calibrate(self) -> None:
        """Compare the engine with the trainer while it runs its start weights, once there is a baseline."""
        engine = self._engine
        if self._is_calibrated or not engine.is_reachable or engine.label is not None:
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
            engine.start_problem = None if proof.is_proven else other_start(proof)
            name = "engine_calibrated" if proof.is_proven else "start_model_differs"
            self._reporter.event("info" if proof.is_proven else "warning", name, **_figures(proof))
            self._test_reload()

    def _test_reload(self) -> None:
        """Have the engine reload what it runs, once: whether it can do so at all shows before a version needs it."""
        if not self._tests_reload:
            return
        try:
            proof = self._engine.test_reload()
        except ConfigError:
            raise
        except EngineUnreachableError as error:
            self._engine.lose(error)
        except SyncdError as error:
            self._reporter.event("error", "reload_test_failed", reason=str(error), hint=error.hint)
        else:
            if proof is not None:
                self._reporter.event("info", "reload_tested", **_figures(proof))

    def _pair_of(self, step: int) -> Pair:
        newest = self._versions.newest
        return (newest.generation if newest else 0), step


def _figures(proof: Proof) -> dict[str, float]:
    """Return the figures of a proof for an event."""
    return {"mean": proof.mean, "tolerance": proof.tolerance}
