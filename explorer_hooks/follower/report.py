"""What a follower reports: its presence, its events, and its ready file."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from explorer_hooks.follower.policy import EventListener
from syncd.client.client import Client
from syncd.errors import StorageError
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
        self.state = ""
        self.applied: Pair | None = None
        """The version that the presence names as running."""

    def publish(self, state: str, *, now: bool = True, **fields: Any) -> None:
        """Publish the state and other fields in the presence; None removes a field."""
        self.state = state
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
