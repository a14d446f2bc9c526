"""Drives one engine: polls what it runs, loads what is due, and reports the result."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from explorer_hooks.follower.engine import Engine
from explorer_hooks.follower.policy import EventListener, FollowOptions, TurnOutcome, is_within
from explorer_hooks.follower.versions import FailedVersions, Fetcher, KnownVersions
from syncd.client.client import Client
from syncd.errors import (
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
from syncd.protocol.version import Pair, Version, label_of
from syncd.transports.filesystem.directory import HeldDirectory, LoadTimings


class Reporter:
    """Reports what happens.

    If a presence cannot be written, the engine is not touched: the heartbeat writes it later.

    Args:
        sync: The follower's connection to the job.
        listener: Hears each event; None for nobody.
        ready: The ready file.
    """

    def __init__(self, sync: Client, listener: EventListener | None, ready: "ReadyFile") -> None:
        self._sync, self._listener, self.ready = sync, listener, ready
        self.applied: Pair | None = None
        """The version that the presence names as running."""

    def publish(self, state: str, *, now: bool = True, **fields: Any) -> None:
        """Publish the state and other fields in the presence; None removes a field."""
        self._write(lambda: self._sync.describe({"state": state, **fields}, now=now))

    def confirm(self, pair: Pair | None) -> None:
        """Publish the version that the engine has confirmed."""
        self.applied = pair
        self._write(lambda: self._sync.confirm(pair))

    def event(self, level: str, name: str, **fields: Any) -> None:
        """Report an event to the listener."""
        if self._listener is not None:
            self._listener(level, name, fields)

    def _write(self, write: Callable[[], None]) -> None:
        # The first call may only raise an error of the heartbeat before it; it is reported, and the write repeated.
        for _ in range(2):
            try:
                write()
            except StorageError as error:
                self.event("warning", "presence_write_failed", reason=str(error))
            else:
                return


class ReadyFile:
    """A file that exists while the engine is ready, for load balancers; at the start a stale one is removed.

    Args:
        path: The file; None for no file.

    Raises:
        OSError: The file can neither be removed nor created.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._shown: str | None = None
        self._remove()

    def show(self, label: str | None) -> None:
        """Write the version that is served into the file; None removes it."""
        if self._path is None or label == self._shown:
            return
        if label is None:
            self._remove()
        else:
            temporary = f"{self._path}.{os.getpid()}.tmp"
            with open(temporary, "w", encoding="ascii") as file:
                file.write(f"{label}\n")
            os.replace(temporary, self._path)
        self._shown = label

    def _remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


_NOTICED = "noticed"
"""The age of a version when it was read: a part of the timings, but not of the load."""


class EngineDriver:
    """Loads versions into one engine and reports what it runs.

    Args:
        engine: The engine.
        versions: The versions of the job.
        fetcher: Fetches the directories of versions.
        reporter: Reports what happens.
        clock: This host's clock.
        options: How to follow.
    """

    def __init__(
        self,
        engine: Engine,
        versions: KnownVersions,
        fetcher: Fetcher,
        reporter: Reporter,
        clock: Clock,
        options: FollowOptions,
    ) -> None:
        self._engine, self._versions, self._fetcher, self._reporter = engine, versions, fetcher, reporter
        self._clock, self._max_lag = clock, options.max_lag
        self.failed = FailedVersions(clock, options.retries, options.backoff)
        self.position: Pair | None = None
        """The version that was loaded last: the engine should run it unless a newer one is due."""
        self._loads, self._bytes = 0, 0
        self._is_polled = False

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
        self._is_polled = True
        self._publish()

    def show_ready(self) -> None:
        """Update the ready file."""
        engine = self._engine
        is_good = engine.is_reachable and not engine.is_suspect
        is_recent = is_within(engine.applied, self._versions.pair, self._max_lag)
        served = engine.applied if is_good and is_recent else None
        self._reporter.ready.show(label_of(served) if served else None)

    def load(self, wanted: Version | int) -> TurnOutcome:
        """Load a version.

        Raises:
            EngineDeadError: The engine can neither load it nor be restored.
            UsageError: This process may not act for its explorer any more.
        """
        timings = LoadTimings(self._clock)
        pair = wanted.pair if isinstance(wanted, Version) else self._pair_of(wanted)
        if isinstance(wanted, Version) and wanted.published_at:
            timings[_NOTICED] = round(max(self._clock.time() - wanted.published_at, 0.0), 6)
        self._reporter.publish("loading", now=False, refused=None, failed=None)
        try:
            held = self._fetch_and_load(wanted, timings)
        except UsageError:
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
        elif engine.is_reachable and good is not None and engine.dead is None:
            engine.die(EngineDeadError(f"the engine cannot be restored to {good.directory.label}"))
        self._publish()

    def close(self) -> None:
        """Remove the ready file, and give up the last good version; the engine keeps running."""
        self._reporter.ready.show(None)
        self._engine.close()

    def _publish(self, **fields: Any) -> None:
        """Publish the state that the engine is in now."""
        engine = self._engine
        state = "dead" if engine.dead else "serving" if engine.applied else "waiting"
        if self._reporter.applied != engine.applied:
            self._reporter.confirm(engine.applied)
        self._reporter.publish(state if engine.is_reachable else "unreachable", **fields)
        self.show_ready()

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
            self._reporter.event("debug", "load_started", version=label_of(held.pair), path=directory.path)
            self._engine.load(directory, timings)
            undo.pop_all()
            return held

    def _report_applied(self, held: HeldDirectory, timings: LoadTimings) -> TurnOutcome:
        self._loads, self._bytes = self._loads + 1, self._bytes + held.size
        self.position = held.pair
        self.failed.clear()
        seconds = round(sum(spent for part, spent in timings.items() if part != _NOTICED), 6)
        self._reporter.publish(
            "serving",
            now=False,
            staged=held.staged_at,
            loaded={"step": held.pair[1], "source": held.source, "seconds": seconds},
            timings=dict(timings),
            loads=self._loads,
            bytes=self._bytes,
        )
        self._reporter.confirm(held.pair)
        self.show_ready()
        self._engine.keep(held)
        self._fetcher.sweep()
        version = label_of(held.pair)
        self._reporter.event("info", "version_applied", version=version, source=held.source, **timings)
        return TurnOutcome("applied", held.pair, timings=dict(timings))

    def _report_failure(self, pair: Pair, error: SyncdError | OSError) -> TurnOutcome:
        reason, version = str(error), label_of(pair)
        problem = {"version": version, "reason": reason}
        if isinstance(error, EngineDeadError):
            self.failed.give_up(pair)
            self._publish_event("error", "engine_died", problem, failed=problem)
            raise error
        if isinstance(error, EngineUnreachableError):
            self._engine.lose(error)
            self._publish_event("warning", "engine_connection_failed", {"reason": reason})
            return TurnOutcome("unreachable", pair, reason)
        if isinstance(error, TryAgainError):
            self.failed.miss(pair)
            self._publish_event("info", "version_skipped", problem)
            return TurnOutcome("gone", pair, reason)
        if isinstance(error, RefusedError):
            self.failed.give_up(pair)
            self._publish_event("error", "load_refused", problem, refused=problem)
            return TurnOutcome("refused", pair, reason)
        again = self.failed.fail(pair)
        self._publish_event("warning", "load_failed", {**problem, "again": again}, failed=problem)
        return TurnOutcome("failed", pair, reason)

    def _publish_event(self, level: str, name: str, event: Mapping[str, Any], **fields: Any) -> None:
        self._publish(**fields)
        self._reporter.event(level, name, **event)

    def _accept_running(self) -> None:
        """Report what an engine runs that is polled for the first time or came back, and keep its files."""
        engine = self._engine
        level = "info" if engine.is_known else "warning"
        fields = {"known": engine.is_known, "version": engine.label, "suspect": engine.is_suspect}
        self._reporter.event(level, "engine_runs", **fields)
        if engine.applied is not None and self.position is None:
            self.position = engine.applied
            self._keep_running(engine.applied)

    def _keep_running(self, pair: Pair) -> None:
        """Keep the files of the version that the engine runs already."""
        held = self._fetcher.fetch_running(pair)
        if held is not None:
            self._engine.keep(held)

    def _pair_of(self, step: int) -> Pair:
        newest = self._versions.newest
        return (newest.generation if newest else 0), step
