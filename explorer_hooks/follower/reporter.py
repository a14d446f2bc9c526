"""What a follower tells others: the presence, events, the ready file, and the answer to health checks."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from explorer_hooks.follower.policy import EventListener
from syncd.client.client import Client
from syncd.errors import StorageError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.presence import HEARTBEAT
from syncd.protocol.version import Pair, label_of

SILENT = 30.0  # seconds without a sign of life of the follower's thread, after which a health check fails


class Reporter:
    """Reports what happens. If a presence cannot be written, no engine is touched: the heartbeat writes it later."""

    def __init__(self, client: Client, listener: EventListener | None, ready: "Readiness") -> None:
        self._client, self._listener, self.ready = client, listener, ready
        ready.problem = lambda error: self.event("warning", "ready_file_failed", reason=str(error))
        self.report = EngineReport(since=client.clock.time())
        self.applied: Pair | None = None  # the version that the presence names as running

    def publish(
        self,
        state: EngineState,
        reason: str = "",
        *,
        now: bool = True,
        more: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """Publish the engine's state and other changes of its report in the presence.

        Args:
            now: Whether to write at once, and not with the next heartbeat.
            more: Further facts of the presence; None removes one.
        """
        since = self.report.since if state is self.report.state else self._client.clock.time()
        self.report = replace(self.report, state=state, since=since, reason=reason, **changes)
        document = {**self.report.document(), **(more or {})}
        self._write(lambda: self._client.describe(document, now=now))

    def confirm(self, pair: Pair | None) -> None:
        self.applied = pair
        self._write(lambda: self._client.confirm(pair))

    def event(self, level: str, name: str, **fields: Any) -> None:
        if self._listener is not None:
            self._listener(level, name, fields)

    def health(self, *, watched: bool = True) -> tuple[bool, dict[str, Any]]:
        """Return whether the engine is ready, and what a health check answers. Any thread may call this.

        Args:
            watched: Whether an engine whose follower's thread has long not shown that it works is not ready.
        """
        report, served, silent = self.report, self.ready.served, self.ready.silent_for()
        reason, is_silent = report.reason, watched and silent >= SILENT
        if is_silent:
            reason = f"the follower has not reported for {silent:.0f} s"
        elif served is None and not reason:
            reason = "it runs no version that is recent enough"
        is_ready = served is not None and not is_silent
        document = {"ready": is_ready, "state": report.state.value, "since": report.since, "reason": reason}
        return is_ready, {**document, "version": served or (label_of(self.applied) if self.applied else None)}

    def _write(self, write: Callable[[], None]) -> None:
        # The first call may only raise an error of the heartbeat before it; it is reported, and the write repeated.
        for _ in range(2):
            try:
                write()
            except StorageError as error:
                self.event("warning", "presence_write_failed", reason=str(error))
            else:
                return


class Readiness:
    """Which version the engine is ready to serve, and that the follower's thread works.

    The ready file, for load balancers, exists while there is such a version. It holds the version and the time of the
    last heartbeat. At the start a stale one is removed. If it cannot be written or removed, `problem` hears why, and
    beats try it again.
    """

    def __init__(self, path: str | None, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self.problem: Callable[[OSError], None] = lambda _: None
        self._lock = threading.Lock()
        self._is_written = True  # whether the file says what it should
        self.served: str | None = None  # the label of the version; None if the engine is not ready
        self._beat = clock.monotonic()
        self._written = float("-inf")
        self._remove()

    def silent_for(self) -> float:
        """Return the seconds since the follower's thread was last seen to work."""
        return self._clock.monotonic() - self._beat

    def show(self, label: str | None) -> None:
        with self._lock:
            before, self.served = self.served, label
            if label != before:
                self._update()
        self.beat()

    def beat(self) -> None:
        """Note that the follower's thread works; every few seconds write that into the file too. Never raises."""
        self._beat = self._clock.monotonic()
        with self._lock:
            is_due = self.served is not None or not self._is_written
            if is_due and self._beat - self._written >= HEARTBEAT:
                self._update()

    def _update(self) -> None:
        """Write the file, or remove it while the engine serves no version."""
        was_written, self._written = self._is_written, self._clock.monotonic()
        try:
            self._remove() if self.served is None else self._write(self.served)
        except OSError as error:
            self._is_written = False
            if was_written:
                self.problem(error)
        else:
            self._is_written = True

    def _write(self, label: str) -> None:
        if self._path is None:
            return
        temporary = f"{self._path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="ascii") as file:
            file.write(f"{label} {self._clock.time():.0f}\n")
        os.replace(temporary, self._path)

    def _remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
