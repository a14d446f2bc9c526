"""What a follower tells others: the presence, events, and the ready file."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from explorer_hooks.follower.policy import EventListener
from syncd.client.client import Client
from syncd.errors import StorageError
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.version import Pair


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
        self.report = EngineReport(since=sync.clock.time())
        self.applied: Pair | None = None
        """The version that the presence names as running."""

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
            state: The state.
            reason: Why it is in this state.
            now: Whether to write at once, and not with the next heartbeat.
            more: Further facts of the presence; None removes one.
            changes: Further fields of the report.
        """
        since = self.report.since if state is self.report.state else self._sync.clock.time()
        self.report = replace(self.report, state=state, since=since, reason=reason, **changes)
        document = {**self.report.document(), **(more or {})}
        self._write(lambda: self._sync.describe(document, now=now))

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
