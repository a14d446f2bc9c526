"""Drives one engine: looks what it runs, loads what is given to it, and publishes what became of it."""

import contextlib
from typing import Any

from explorer_hooks.follower.attempts import Attempts
from explorer_hooks.follower.engine import Engine
from explorer_hooks.follower.fetch import Placed, Placing
from explorer_hooks.follower.load import Loading
from explorer_hooks.follower.options import FollowOptions, Outcome
from explorer_hooks.follower.policy import is_within
from explorer_hooks.follower.reporter import Telling, record_of
from explorer_hooks.follower.timing import NOTICED, Timings
from explorer_hooks.follower.versions import Versions
from syncd.errors import (
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
    TryAgainError,
    UsageError,
)
from syncd.protocol.disk import Clock
from syncd.protocol.version import Pair, Version, label_of


class Driver:
    """One engine and what is known of it.

    Args:
        engine: The engine.
        versions: What is published.
        placing: Puts versions where the engine can load them.
        telling: Tells what happens.
        clock: This host's clock.
        options: How to follow.
    """

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        placing: Placing,
        telling: Telling,
        clock: Clock,
        options: FollowOptions,
    ) -> None:
        self.engine, self._versions, self._placing, self._telling = engine, versions, placing, telling
        self._clock, self._max_lag = clock, options.max_lag
        self._loading = Loading(engine)
        self.attempts = Attempts(clock, options.retries, options.backoff)
        self.position: Pair | None = None
        """The version that was loaded last, and that the engine should run unless a newer one is due."""
        self._loads, self._bytes = 0, 0
        self._is_met = False

    @property
    def needs_load(self) -> bool:
        """Say whether the engine runs something else than it should, or may be half loaded."""
        return self.engine.is_suspect or self.engine.applied != self.position

    @property
    def can_go_back(self) -> bool:
        """Say whether there is anything to be done for an engine that no version can be loaded into."""
        return self._loading.good is not None or self.engine.is_suspect

    def close(self) -> None:
        """Let go of the last good version; the engine keeps running."""
        self._telling.ready.show(None)
        self._loading.close()
        self.engine.hook.close()

    def look(self) -> None:
        """Ask the engine what it runs, and publish that."""
        before, was_reachable = self.engine.applied, self.engine.is_reachable
        self.engine.ask()
        if not self.engine.is_reachable:
            if was_reachable or not self._is_met:
                self._telling.event("warning", "engine_connection_failed", reason=self.engine.reason)
        elif not was_reachable or self.engine.applied != before:
            self._meet()
        self._is_met = True
        self.settle()

    def settle(self, **fields: Any) -> None:
        """Publish the state that the engine is in now."""
        engine = self.engine
        state = "dead" if engine.dead else "serving" if engine.applied else "waiting"
        if self._telling.applied != engine.applied:
            self._telling.confirm(engine.applied)
        self._telling.say(state if engine.is_reachable else "unreachable", **fields)
        self.show()

    def show(self) -> None:
        """Let the ready file say whether the engine is to be given work."""
        engine = self.engine
        is_good = engine.is_reachable and not engine.is_suspect
        is_near = is_within(engine.applied, self._versions.pair, self._max_lag)
        served = engine.applied if is_good and is_near else None
        self._telling.ready.show(label_of(served) if served else None)

    def load(self, wanted: Version | int) -> Outcome:
        """Load a version.

        Raises:
            EngineDeadError: The engine can neither load it nor go back.
            UsageError: This process may not act for its explorer any more.
        """
        timings = Timings(self._clock)
        pair = wanted.pair if isinstance(wanted, Version) else self._pair_of(wanted)
        if isinstance(wanted, Version) and wanted.published_at:
            timings[NOTICED] = round(max(self._clock.time() - wanted.published_at, 0.0), 6)
        self._telling.say("loading", now=False, refused=None, failed=None)
        try:
            placed = self._loaded(wanted, timings)
        except UsageError:
            raise
        except (SyncdError, OSError) as error:
            return self._not_applied(pair, error)
        return self._applied(placed, timings)

    def adopt(self, pair: Pair) -> None:
        """Take over a version that has reached the engine by another way; its files are the way back to it."""
        self.position = pair
        self.attempts.succeed()
        self._hold(pair)
        self.look()

    def recover(self) -> None:
        """Bring the engine back, or have the next version loaded into it where there is nothing to go back to."""
        if self._loading.good is not None:
            self.bring_back()
            return
        self.engine.is_suspect = True
        self.engine.ask()
        self.settle()

    def bring_back(self) -> None:
        """Put the engine back on the last good version, where there is nothing else for it."""
        with contextlib.suppress(EngineDeadError):  # the engine's own state says it
            self._loading.recover()
        good, engine = self._loading.good, self.engine
        label = good.target.label if good else None
        is_back = not engine.is_suspect and (good is None or engine.applied == good.pair)
        if engine.is_reachable and engine.dead is None and is_back:
            self.position = engine.applied
            shown = label_of(good.pair) if good else None
            self._telling.event("info", "engine_restored", version=shown)
        elif engine.is_reachable and good is not None and engine.dead is None:
            engine.die(EngineDeadError(f"the engine does not go back to {label}"))
        if good is not None and is_back:
            self._loading.keep(good)
        self.settle()

    def _loaded(self, wanted: Version | int, timings: Timings) -> Placed:
        try:
            return self._tried(wanted, timings)
        except (LoadFailedError, RefusedError) as error:
            if not self._placing.copies.spoil():
                raise
            self._telling.event("warning", "memory_load_failed", reason=str(error))
        return self._tried(wanted, timings)  # what memory held is no reason to give up what the files hold

    def _tried(self, wanted: Version | int, timings: Timings) -> Placed:
        with contextlib.ExitStack() as undo:
            placed = self._placing.place(wanted, timings)
            undo.callback(placed.close)
            self._versions.know(placed.target.label)
            self._loading.prepare(placed.target, timings)
            self._telling.event(
                "debug", "load_started", version=label_of(placed.pair), path=placed.target.path
            )
            self._loading.load(placed, timings)
            undo.pop_all()
            return placed

    def _applied(self, placed: Placed, timings: Timings) -> Outcome:
        self._loads, self._bytes = self._loads + 1, self._bytes + placed.size
        self.position = placed.pair
        self.attempts.succeed()
        counted: dict[str, Any] = {"loads": self._loads, "bytes": self._bytes}
        loaded = {"step": placed.pair[1], "source": placed.source, "seconds": timings.load}
        told = {"staged": placed.staged_at, "loaded": loaded, "timings": dict(timings), **counted}
        self._telling.say("serving", now=False, **told)
        self._telling.confirm(placed.pair)
        self.show()
        placed.settle()
        self._loading.keep(placed)
        self._placing.tidy()
        self._telling.event(
            "info", "version_applied", version=label_of(placed.pair), source=loaded["source"], **timings
        )
        return Outcome("applied", placed.pair, timings=dict(timings))

    def _not_applied(self, pair: Pair, error: SyncdError | OSError) -> Outcome:
        reason, record = str(error), record_of(pair, str(error))
        if isinstance(error, EngineDeadError):
            self.attempts.give_up(pair)
            self.settle(failed=record)
            self._telling.event("error", "engine_died", version=label_of(pair), reason=reason)
            raise error
        if isinstance(error, EngineUnreachableError):
            self.engine.lose(error)
            self.settle()
            self._telling.event("warning", "engine_connection_failed", reason=reason)
            return Outcome("unreachable", pair, reason)
        if isinstance(error, TryAgainError):
            self.attempts.miss(pair)
            self.settle()
            self._telling.event("info", "version_skipped", version=label_of(pair), reason=reason)
            return Outcome("gone", pair, reason)
        if isinstance(error, RefusedError):
            self.attempts.give_up(pair)
            self.settle(refused=record)
            self._telling.event("error", "load_refused", version=label_of(pair), reason=reason)
            return Outcome("refused", pair, reason)
        again = self.attempts.fail(pair)
        self.settle(failed=record)
        self._telling.event("warning", "load_failed", version=label_of(pair), reason=reason, again=again)
        return Outcome("failed", pair, reason)

    def _meet(self) -> None:
        """Take over what an engine runs that has come back, or is met for the first time."""
        pair = self.engine.applied
        known, said = self.engine.is_known, {"version": self.engine.label, "suspect": self.engine.is_suspect}
        self._telling.event("info" if known else "warning", "engine_runs", known=known, **said)
        if pair is not None and self.position is None:
            self.position = pair
            self._hold(pair)

    def _hold(self, pair: Pair) -> None:
        """Keep the files of what the engine runs already."""
        placed = self._placing.adopt(pair)
        if placed is not None:
            placed.settle()
            self._loading.keep(placed)

    def _pair_of(self, step: int) -> Pair:
        newest = self._versions.newest
        return (newest.generation if newest else 0), step
