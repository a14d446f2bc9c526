"""The results of loads: which versions are tried again, and what the presence and the events say of the engine."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from explorer_hooks.follower.policy import FollowOptions, TurnOutcome, is_within
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.running_engine import EngineStatus
from explorer_hooks.follower.versions import FailedVersions, KnownVersions
from explorer_hooks.proof.judgement import UnprovenError, has_grown
from explorer_hooks.proof.prover import Prover
from syncd.errors import (
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    StorageError,
    SyncdError,
    TryAgainError,
)
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import GIVEN_UP, EngineState, GivenUp, Proof
from syncd.protocol.rolling import GATE, AtGate
from syncd.protocol.version import Pair, label_of
from syncd.transports.files.leased_directory import HeldDirectory, LoadTimings

NOTICED = "noticed"  # the age of a version when it was read: a part of the timings, but not of the load


class InterruptedLoadError(LoadFailedError):
    """The connection to the engine was lost during a load, and nothing shows that the engine ended: load it again."""

    code = "load_interrupted"


_MAY_PASS = (InterruptedLoadError, StorageError, OSError)
"""What may be the fault of a network, a mount or a full disk: it says nothing about the version."""


class LoadResults:
    def __init__(
        self,
        status: EngineStatus,
        versions: KnownVersions,
        reporter: Reporter,
        prover: Prover,
        clock: Clock,
        options: FollowOptions,
    ) -> None:
        self._status, self._versions, self._reporter, self._prover = status, versions, reporter, prover
        self._max_lag, self._bytes = options.max_lag, 0
        self.failed = FailedVersions(clock, options.retries, options.backoff)
        self._trouble: GivenUp | None = None
        """Why the newest version that was tried does not run, None if it does."""
        self._troubled: Pair | None = None  # that version
        self.gate: AtGate | None = None
        """What it has fetched and waits for, or loads since a gate has admitted it; None where nothing waits."""

    def is_troubled(self, pair: Pair) -> bool:
        return pair == self._troubled

    def clear_trouble(self) -> None:
        self._trouble = self._troubled = None

    def publish(self, more: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Publish the state that the engine is in now, and the version that it has confirmed, in one write."""
        applied, (state, reason) = self._status.applied, self._state()
        is_same = self._reporter.applied == applied
        is_ready, proof = self._is_ready(), self._prover.last
        if not is_ready:
            self._reporter.ready.show(None)  # before the presence: writing that may take long
        exam = {"exam": self._status.exam, "unseen": self._status.unseen}
        facts = {**(more or {}), **self._at_gate()}
        self._reporter.publish(
            state, reason, now=is_same, more=facts, ready=is_ready, proof=proof, **exam, **changes
        )
        if not is_same:
            self._reporter.confirm(applied)
        self.show_ready()

    def _at_gate(self) -> dict[str, Any]:
        return {GATE: asdict(self.gate) if self.gate else None}

    def show_ready(self) -> None:
        served = self._status.applied if self._is_ready() else None
        self._reporter.ready.show(label_of(served) if served else None)

    def publish_loading(self, held: HeldDirectory) -> None:
        """Report that the engine is not ready: it is about to change, and has yet to prove what it runs then."""
        version = label_of(held.pair)
        self._reporter.ready.show(None)
        at_once = self.gate is not None  # who counts those that have paused must not learn it later
        self._reporter.publish(EngineState.LOADING, version, now=at_once, ready=False, more=self._at_gate())
        self._reporter.event("debug", "load_started", version=version, path=held.directory.path)

    def publish_applied(self, held: HeldDirectory, timings: LoadTimings, filled: float | None) -> None:
        """Publish that a version runs; `filled`: seconds to read and fill, for the trainer, None of a staged copy."""
        self.clear_trouble()
        self._bytes += held.size
        self.failed.clear()
        seconds = round(sum(spent for part, spent in timings.items() if part != NOTICED), 6)
        more = {} if filled is None else {"filled": round(filled, 6)}
        loaded = {"step": held.pair[1], "source": held.shown_source, "seconds": seconds, **more}
        facts = {"staged": held.staged_at, "loaded": loaded, "timings": dict(timings), "bytes": self._bytes}
        self.publish(facts, loads=self._reporter.report.loads + 1, load_seconds=seconds)

    def report_applied(self, held: HeldDirectory, timings: LoadTimings) -> TurnOutcome:
        version, is_proven = label_of(held.pair), self._status.is_proven
        proof = self._prover.last if is_proven else None
        figures = figures_of(proof) if proof else {}
        fields = {"version": version, "proven": is_proven, "source": held.shown_source, **figures, **timings}
        self._reporter.event("info", "version_applied", **fields)
        if proof and has_grown(proof):
            self._reporter.event("warning", "proof_difference_grew", version=version, **figures)
        return TurnOutcome("applied", held.pair, timings=dict(timings))

    def report_failure(self, pair: Pair, error: SyncdError | OSError) -> TurnOutcome:
        reason, version = str(error), label_of(pair)
        event = {"version": version, "reason": reason}
        if isinstance(error, EngineUnreachableError):
            self._status.lose(error)
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
            hint = error.hint or f"syncd verify JOB {pair[1]} --deep"
            self._publish_event("error", "load_refused", {**event, "hint": hint})
            return TurnOutcome("refused", pair, reason)
        return self._report_retry(pair, error, event)

    def _report_retry(self, pair: Pair, error: SyncdError | OSError, event: Mapping[str, Any]) -> TurnOutcome:
        is_answer = not isinstance(error, _MAY_PASS)
        again = self.failed.fail(pair) if is_answer else self.failed.interrupt(pair)
        self._note_trouble(pair, str(error), is_given_up=not again)
        failure = {**event, "again": again, "hint": getattr(error, "hint", None)}
        if isinstance(error, UnprovenError):
            self._publish_event("warning", "proof_failed", {**failure, **figures_of(error.proof)})
        else:
            self._publish_event("warning", "load_failed", failure)
        return TurnOutcome("failed", pair, str(error))

    def note_death(self, pair: Pair) -> None:
        again = self.failed.fail(pair)
        self._note_trouble(pair, "the engine ended while it loaded it", is_given_up=not again)

    def _give_up(self, pair: Pair, reason: str, *, refused: bool = False) -> None:
        self.failed.give_up(pair)
        self._note_trouble(pair, reason, refused=refused)

    def _note_trouble(
        self, pair: Pair, reason: str, *, refused: bool = False, is_given_up: bool = True
    ) -> None:
        report, digest = self._reporter.report, self._versions.digest_of(pair)
        self._trouble, self._troubled = GivenUp(pair[1], digest, reason, refused, pair[0]), pair
        given_up = (*report.given_up, self._trouble) if is_given_up else report.given_up
        self._reporter.report = replace(report, failures=report.failures + 1, given_up=given_up[-GIVEN_UP:])

    def _publish_event(self, level: str, name: str, event: Mapping[str, Any]) -> None:
        self.publish()
        self._reporter.event(level, name, **event)

    def _state(self) -> tuple[EngineState, str]:
        status, trouble = self._status, self._trouble
        if (disorder := status.disorder()) is not None:
            return disorder
        if trouble is not None:
            return (EngineState.REFUSED if trouble.refused else EngineState.FAILED), trouble.reason
        if status.applied is None:
            return EngineState.WAITING, ""
        return (EngineState.PROVEN if status.is_proven else EngineState.LOADED), ""

    def _is_ready(self) -> bool:
        status = self._status
        is_fit = status.unfit is None and not status.is_examined
        is_good = status.is_reachable and not status.is_suspect and status.applied is not None and is_fit
        return is_good and is_within(status.applied, self._versions.pair, self._max_lag)


def figures_of(proof: Proof) -> dict[str, float]:
    return {"mean": proof.mean, "tolerance": proof.tolerance}
