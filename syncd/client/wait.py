"""Bounded waits: poll until there is a result, the deadline has passed, or the caller cancels.

A wait runs in the thread that calls it. Whatever ends it early (an error, Ctrl-C, `cancelled_by`) leaves as an
exception, so a `finally` of the caller restores what was changed for the wait.
"""

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from syncd.client.rhythm import VersionLookout
from syncd.errors import StorageError, TimedOutError, UsageError, storage_error
from syncd.protocol.disk import Clock
from syncd.protocol.mount import mount_of

T = TypeVar("T")

FIRST_POLL, LOCAL_POLL = 0.001, 0.01
NETWORK_POLL = 0.25
_JITTER = 0.2
PATIENCE = 30.0
"""Seconds for which every poll may fail before a wait gives up on the file system."""


_CANCEL: ContextVar[threading.Event | None] = ContextVar("syncd_cancel", default=None)


class WaitCancelledError(Exception):
    """The event that cancels a wait was set."""


@contextlib.contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """End the waits of this thread within the block with `WaitCancelledError` once an event is set."""
    token = _CANCEL.set(event)
    try:
        yield
    finally:
        _CANCEL.reset(token)


class Pace:
    """The time between two polls: short where a poll is cheap, spread where clients share a server.

    It is `poll` seconds; by the kind of the mount of `path` unless given.
    """

    def __init__(self, path: str, poll: float | None = None) -> None:
        network = poll is None and mount_of(path).is_network
        self.seconds = poll if poll is not None else NETWORK_POLL if network else LOCAL_POLL
        self.looks = network
        """Whether to look for a version between two polls."""
        self._spread = _JITTER if network else 0.0
        self._first = FIRST_POLL if poll is None and not network else self.seconds
        self._random = random.Random()  # noqa: S311 - spreads load, hides nothing

    def next(self) -> float:
        """Return the seconds until the next poll."""
        return self.seconds * (1.0 + self._random.uniform(-self._spread, self._spread))

    def after(self, polls: int) -> float:
        """Return the seconds until the next poll of a wait that has polled so often.

        What is waited for is often about to happen, so on local disks the first pauses are short.
        """
        doubled = self._first * 2.0 ** min(polls - 1, 16)
        return doubled if doubled < self.seconds else self.next()


class Deadline:
    def __init__(self, clock: Clock, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise UsageError(f"a wait of {seconds} seconds has no end", hint="give a timeout in seconds")
        self.seconds = seconds
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, zero or less after the end."""
        return self._end - self._clock.monotonic()


class Poller:
    """Polls for one process.

    Args:
        timeout: Seconds that a wait lasts unless the caller says otherwise.
        hint: The command that an error of a timed out wait names.
        lookout: What ends a pause between two polls early.
        on_wait: See `ClientOptions`.
    """

    def __init__(
        self,
        clock: Clock,
        pace: Pace,
        timeout: float,
        hint: str | None = None,
        lookout: VersionLookout | None = None,
        on_wait: Callable[[str, float], None] | None = None,
    ) -> None:
        self.clock, self.pace, self.lookout, self._on_wait = clock, pace, lookout, on_wait
        self.timeout = Deadline(clock, timeout).seconds
        self._hint = hint

    def until(self, poll: Callable[[], T | None], what: str, timeout: float | None = None) -> T:
        """Poll until there is a result and return it; the last poll comes after the deadline.

        `poll` returns None while there is none; its file system errors are retried. Errors say `what` it waits for.
        """
        deadline = Deadline(self.clock, self.timeout if timeout is None else timeout)
        since, error, polls = 0.0, None, 0
        while True:
            # A server that restarts must not end a training run.
            try:
                if (value := poll()) is not None:
                    return value
                error = None
            except (OSError, StorageError) as failed:
                since = self.clock.monotonic() if error is None else since
                error = failed if isinstance(failed, StorageError) else storage_error(failed, failed.filename)
            if error is not None and self.clock.monotonic() - since >= PATIENCE:
                raise error
            left, polls = deadline.left(), polls + 1
            if left <= 0:
                message = f"{what}: timed out after {deadline.seconds:g} s"
                raise TimedOutError(message, hint=self._hint) from error
            if self._on_wait is not None:
                self._on_wait(what, deadline.seconds - left)
            self._rest(min(self.pace.after(polls), left))

    def pause(self) -> None:
        self._sleep(self.pace.next())

    def _rest(self, seconds: float) -> None:
        if self.lookout is None:
            self._sleep(seconds)
        else:
            self.lookout.wait(seconds, self._sleep)

    def _sleep(self, seconds: float) -> None:
        cancel = _CANCEL.get()
        if cancel is None:
            self.clock.sleep(seconds)
        elif cancel.wait(seconds):
            raise WaitCancelledError
