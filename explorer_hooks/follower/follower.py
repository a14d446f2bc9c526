"""The follower: keeps one engine at the version that its policy names, and reports what it runs."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from explorer_hooks.follower.engine_loader import EngineLoader
from explorer_hooks.follower.gate import open_gates
from explorer_hooks.follower.policy import (
    EventListener,
    FollowOptions,
    FollowSnapshot,
    TurnOutcome,
    choose_version,
    decide,
    is_done,
    is_within,
    needs_steps,
    policy_of,
)
from explorer_hooks.follower.reporter import Readiness, Reporter
from explorer_hooks.follower.versions import Fetcher, KnownVersions
from explorer_hooks.hook import Hook, ProbingHook, Running, Unproven
from explorer_hooks.proof.calibrations import Calibrations
from explorer_hooks.proof.ended_probes import EndedProbes
from explorer_hooks.proof.prover import Prover
from syncd.client.client import Client
from syncd.client.follow import has_caught_up
from syncd.client.wait import Deadline
from syncd.context import Closing
from syncd.errors import CorruptDataError, StorageError, SyncdError, TimedOutError
from syncd.protocol.engine_state import EngineState
from syncd.protocol.probe import read_base_probe
from syncd.protocol.version import UNKNOWN_LABEL, Pair, Version, pair_of
from syncd.transports.base import WeightTensors

__all__ = ["FollowOptions", "Follower", "TurnOutcome"]

_TURN = 10.0  # seconds of one turn of `run`; nothing is lost between two turns

_LAST = ("applied", "refused")
_ONCE = (*_LAST, "failed")


class Follower(Closing):
    """Follows the versions of a job with one engine. One thread uses it, except for `may_work` and `running`.

    Args:
        engine: The engine's name in presence and log, without secrets.
        listener: Hears each event; None for nobody.
        stop: Polled; once it returns true, waits and reads are given up. A load that has begun is finished.

    Examples:
        with Follower.open("/ckpt/job", hook, identity="e0") as follower:
            outcome = follower.turn(timeout=60)
    """

    def __init__(
        self,
        client: Client,
        hook: Hook,
        options: FollowOptions | None = None,
        *,
        engine: str = "",
        listener: EventListener | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.client, self.options = client, options or FollowOptions()
        self._policy, self._stop = policy_of(self.options), stop
        self._versions = KnownVersions(client)
        self._reporter = Reporter(client, listener, Readiness(self.options.ready_file, client.clock))
        self._storage_problem = ""  # why the job cannot be read now, as it was reported
        self._gates = open_gates(client, self.options)
        self._fetcher = Fetcher(
            client, hook, self.options, self._is_stopped, self._reporter.event, self._gates.reads
        )
        answering = hook if isinstance(hook, ProbingHook) else None
        ended = EndedProbes(answering, client.clock, client.job, self._reporter.event) if answering else None
        kept = Calibrations(client.job, answering) if answering else None
        prover = Prover(answering, client.clock, partial(read_base_probe, client.job), ended, kept)
        self._loader = EngineLoader(
            hook,
            self._versions,
            self._fetcher,
            self._reporter,
            prover,
            client,
            self.options,
            self._gates,
        )
        self._engine, self._results = self._loader.status, self._loader.results
        self._reporter.publish(EngineState.WAITING, more={"engine": engine or hook.name, "bytes": 0})

    @classmethod
    def open(
        cls,
        job_dir: str | os.PathLike[str],
        hook: Hook,
        identity: str | None = None,
        options: FollowOptions | None = None,
        *,
        engine: str = "",
        listener: EventListener | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Connect to a job as an explorer, and read from the engine what it runs.

        Args:
            hook: What loads versions into the engine; closed with the follower.
            identity: The explorer's name, unique among live explorers.
        """
        chosen = options or FollowOptions()
        client = Client.open(
            job_dir, "explorer", identity, state_dir=chosen.state_dir, poll=chosen.poll, ttl=chosen.ttl
        )
        try:
            made = cls(client, hook, chosen, engine=engine, listener=listener, stop=stop)
            made._poll()
        except BaseException:
            with contextlib.suppress(SyncdError):
                client.close()
            raise
        return made

    @property
    def applied(self) -> Pair | None:
        return self._engine.applied

    @property
    def met(self) -> int:
        """Return the step that was loaded or given up last, -1 for none."""
        met = [pair for pair in (self._loader.position, *self._results.failed.given_up) if pair]
        return max(met)[1] if met else -1

    def adopt(self, pair: Pair) -> None:
        """Accept a published version that reached the engine by another way than from its files."""
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        self._loader.adopt(pair)

    def add_label(self, label: str) -> None:
        self._versions.add_label(label)

    def running(self) -> Running:
        """Return what the engine says that it runs; a label that is not of this job becomes `UNKNOWN_LABEL`.

        So does no label, if the engine was started with another model than the job's. Any thread may call this.
        """
        running, engine = self._loader.running(), self._engine
        is_start = running.label is None and not self.started_elsewhere
        is_known = is_start or self._versions.has_label(running.label)
        label = running.label if is_known else UNKNOWN_LABEL
        return Running(label, running.paused or engine.is_suspect, self.unproven)

    @property
    def unproven(self) -> Mapping[str, Unproven]:
        """Return which weights are not proven on which the engine has worked, by label. Any thread may ask."""
        return self._engine.unproven.by_label

    @property
    def engine_reason(self) -> str:
        """Return why the engine does not answer, may do no work, or did not load the newest version, else nothing."""
        disorder = self._engine.disorder()
        return disorder[1] if disorder is not None else self._engine.reason

    @property
    def started_elsewhere(self) -> bool:
        """Return whether the engine was found to have been started with another model. Any thread may call this."""
        return self._engine.start_problem is not None

    def pair_named(self, label: str) -> Pair | None:
        """Return the pair that a label of this job names, None of any other label. Any thread may call this."""
        return pair_of(label) if self._versions.has_label(label) else None

    def recover(self) -> None:
        """Restore an engine that other weights have left half loaded; without a good version it stays paused."""
        self._loader.recover()

    def load_received(self, weights: WeightTensors, load: Callable[[], None]) -> None:
        self._versions.add_label(weights.label)
        self._loader.load_received(weights, load)

    def confirm_none(self) -> None:
        """Publish that the engine runs no version, after one that it was given was never published."""
        self._reporter.confirm(None)

    def may_work(self) -> bool:
        """Return whether the engine may be given work.

        It may if it answers, is not half loaded, runs a version of the job or its start model, has not failed to
        prove that, and is at most `max_lag` steps behind.
        """
        if self._engine.disorder() is not None or self._engine.is_suspect:
            return False
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        return is_within(self.applied, self._versions.pair, self.options.max_lag)

    def health(self, *, watched: bool = True) -> tuple[bool, dict[str, Any]]:
        """Return whether the engine is ready, and what a health check answers, as `Reporter.health` does."""
        return self._reporter.health(watched=watched)

    def turn(self, timeout: float = 60.0, *, ask: bool = False) -> TurnOutcome:
        """Wait for a version that is due, and load it; one that failed is retried within the turn.

        Args:
            timeout: Seconds to wait for it; a load that has begun is not cut short.
            ask: Whether to ask the trainer for a version; if it answers that there is none, the wait ends.
        """
        deadline = Deadline(self.client.clock, timeout)
        self._poll()
        last: TurnOutcome | None = None
        while True:
            answer = self._await_version(max(deadline.left(), 0.0), ask=ask)
            if isinstance(answer, TurnOutcome):
                return last if last is not None and answer.kind == "nothing" else answer
            last = self._loader.load(answer)
            if last.kind in _LAST or last.pair in self._results.failed.given_up:
                return last

    def published_steps(self) -> tuple[int, ...]:
        """Return the steps up to the published one that have a directory and were not abandoned, in order."""
        self._versions.read()
        newest = self._versions.newest
        return (*self._versions.older_steps(), newest.step) if newest is not None else ()

    def load_step(self, step: int) -> TurnOutcome:
        """Load a step now, whatever the policy names; it is leased until another one is loaded."""
        self._poll()
        pair = self._versions.pair
        is_newest = pair is not None and pair[1] == step
        wanted = self._versions.to_lease(pair) if pair is not None and is_newest else step
        return self._loader.load(wanted, at_once=True)

    def is_current(self) -> bool:
        return self.applied is not None and choose_version(self._policy, self._snapshot()) is None

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        hear: Callable[[TurnOutcome], None] = lambda _: None,
        *,
        once: bool = False,
    ) -> TurnOutcome:
        """Take turns until told to stop, the trainer ends or the policy wants nothing more; return the last outcome.

        Args:
            stop: Polled. A load that has begun is finished first.
            hear: Called with each outcome, except for turns in which nothing happened.
            once: Whether the first version that is loaded, refused or failed ends it too.
        """
        self._stop = stop
        while True:
            try:
                outcome = self.turn(_TURN)
            except StorageError as error:
                self._note_storage_problem(error)
                outcome = TurnOutcome("nothing", reason=str(error))
            if outcome.kind != "nothing":
                hear(outcome)
            if stop() or self._is_last(outcome) or (once and outcome.kind in _ONCE):
                return outcome

    def close(self) -> None:
        """Publish that this explorer has stopped; the engine keeps running. A second call does nothing."""
        self._loader.close()
        try:
            self.client.close()
        finally:
            self._fetcher.close()

    def _is_stopped(self) -> bool:
        self._reporter.ready.beat()  # whatever this thread waits for or reads, it asks this again and again
        return self._stop()

    def _poll(self) -> None:
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        self._loader.poll()

    def _await_version(self, timeout: float, *, ask: bool) -> Version | int | TurnOutcome:
        try:
            if ask and self._engine.is_reachable:
                return self._await_answer(timeout)
            version = self.client.wait_for(self._next, timeout)
        except TimedOutError as error:
            unread = error.__cause__ if isinstance(error.__cause__, StorageError) else None
            self._note_storage_problem(unread)
            if self._engine.is_reachable:
                return TurnOutcome("nothing", reason=str(unread or "no version was due in time"))
            return TurnOutcome("unreachable", reason=self._engine.reason)
        assert version is not None
        self._note_storage_problem(None)
        return version

    def _note_storage_problem(self, error: StorageError | None) -> None:
        """Report that the job cannot be read, once until it can: no version reaches the engine meanwhile."""
        problem = "" if error is None else str(error)
        if error is not None and problem != self._storage_problem:
            self._reporter.event("error", "storage_failed", reason=problem, hint=error.hint)
        self._storage_problem = problem

    def _await_answer(self, timeout: float) -> Version | int | TurnOutcome:
        version = self._next()
        if version is None:
            self.client.wait_for_version(self.met, timeout=timeout)
            version = self._next()
        return (
            version if version is not None else TurnOutcome("nothing", reason="the trainer has nothing newer")
        )

    def _next(self) -> Version | int | TurnOutcome | None:
        """Return what is to be loaded now, why nothing will be, or None while that may change."""
        if self._is_stopped():
            return TurnOutcome("nothing", reason="told to stop")
        with contextlib.suppress(CorruptDataError):  # the daemon is about to replace the file
            self._versions.read()
        if self._engine.is_due:
            self._loader.poll()
        self._results.show_ready()
        if self._engine.dead is not None:
            raise self._engine.dead
        return self._decide() if self._engine.is_reachable and self._engine.unfit is None else None

    def _decide(self) -> Version | int | TurnOutcome | None:
        decision = decide(self._policy, self._snapshot())
        if not isinstance(decision, str):
            return None if self._loader.waits_for(decision) else self._to_lease(decision)
        self._loader.stop_waiting()
        if decision == "restore":
            self._loader.restore()
            return None
        if decision == "end":
            return TurnOutcome("ended", self.applied, "the step that was wanted is loaded")
        if decision == "missing":
            return TurnOutcome("gone", reason=f"step {self._policy.step} no longer exists")
        if not self.options.stay and not self._results.failed.paused and self._has_trainer_ended():
            return TurnOutcome("ended", self.applied, "the trainer is gone")
        return None

    def _to_lease(self, pair: Pair) -> Version | int:
        return self._gates.version(pair) or self._versions.to_lease(pair)

    def _snapshot(self) -> FollowSnapshot:
        failed, loader = self._results.failed, self._loader
        now = FollowSnapshot(
            self._gates.target(self._versions.pair, self.applied) or loader.position,
            loader.position,
            loader.needs_load,
            skipped=failed.given_up | failed.paused,
            applied=self.applied,
            retries=bool(failed.paused),
            can_restore=loader.can_restore,
            quarantined=self._versions.quarantined,
            last_good=self._versions.last_good,
        )
        return replace(now, steps=self._versions.older_steps()) if needs_steps(self._policy, now) else now

    def _has_trainer_ended(self) -> bool:
        departed = self.client.trainers.departed() or ()
        return any(has_caught_up(self._versions.newest, trainer) for trainer in departed)

    def _is_last(self, outcome: TurnOutcome) -> bool:
        is_missing = outcome.kind == "gone" and outcome.pair is None
        return outcome.kind == "ended" or is_missing or is_done(self._policy, self.applied)
