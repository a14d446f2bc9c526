"""Waits, written once for threads and for asyncio.

A wait is a generator: it looks, yields how many seconds to sleep, looks again, and returns its result. A
driver does the sleeping. Whatever ends a wait early (an exception, Ctrl-C, cancellation) closes the
generator, so what it has changed is restored by its own `finally`.
"""

import asyncio
import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from syncd.errors import StorageError, TimedOutError, UsageError, storage_error
from syncd.protocol.disk import Clock
from syncd.protocol.mount import mount_of

T = TypeVar("T")
Wait: TypeAlias = Generator[float, None, T]

LOCAL_POLL = 0.01
NETWORK_POLL = 0.25
_JITTER = 0.2
PATIENCE = 30.0
"""Seconds for which every look may fail before a wait gives up on the file system."""


class Pace:
    """How long to sleep between two looks: short where looking is cheap, spread where a server is shared.

    Args:
        path: The directory that is looked at.
        poll: Seconds between two looks; by the kind of mount unless given.
    """

    def __init__(self, path: str, poll: float | None = None) -> None:
        network = poll is None and mount_of(path).is_network
        self.seconds = poll if poll is not None else NETWORK_POLL if network else LOCAL_POLL
        self._spread = _JITTER if network else 0.0
        self._random = random.Random()  # noqa: S311 - spreads load, hides nothing

    def next(self) -> float:
        """Return the seconds until the next look."""
        return self.seconds * (1.0 + self._random.uniform(-self._spread, self._spread))


class Deadline:
    """When a wait ends at the latest.

    Args:
        clock: This host's clock.
        seconds: How long to wait.

    Raises:
        UsageError: The wait would not be bounded.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise UsageError(f"a wait of {seconds} seconds has no end", hint="give a timeout in seconds")
        self.seconds = seconds
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; not above zero once it is over."""
        return self._end - self._clock.monotonic()


def until(
    look: Callable[[], T | None],
    deadline: Deadline,
    pace: Pace,
    clock: Clock,
    *,
    what: str,
    hint: str | None = None,
) -> Wait[T]:
    """Look until there is a result; the last look comes after the deadline.

    Args:
        look: Returns the result, None while there is none. Failures of the file system are tried again.
        deadline: When to give up.
        pace: How often to look.
        clock: This host's clock.
        what: What is waited for, for the error.
        hint: What to run when it does not come.

    Raises:
        TimedOutError: The deadline has passed.
        StorageError: The file system has failed for `PATIENCE` seconds.
    """
    failing = _Failing(clock)
    while True:
        found = failing.look(look)
        if found is not None:
            return found
        left = deadline.left()
        if left <= 0:
            message = f"{what}: nothing within {deadline.seconds:g} s"
            raise TimedOutError(message, hint=hint) from failing.error
        yield min(pace.next(), left)


class _Failing:
    """Lets looks fail for a while: a server that restarts is no reason to stop a training run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self.error: StorageError | None = None

    def look(self, look: Callable[[], T | None]) -> T | None:
        try:
            found = look()
        except OSError as error:
            self._note(storage_error(error, error.filename))
        except StorageError as error:
            self._note(error)
        else:
            self._since = self.error = None
            return found
        return None

    def _note(self, error: StorageError) -> None:
        now = self._clock.monotonic()
        self._since, self.error = now if self._since is None else self._since, error
        if now - self._since >= PATIENCE:
            raise error


def drive(wait: Wait[T], clock: Clock) -> T:
    """Run a wait in this thread."""
    try:
        while True:
            advanced = _advance(wait)
            if isinstance(advanced, _Ended):
                return advanced.result
            clock.sleep(advanced)
    finally:
        wait.close()


async def drive_async(wait: Wait[T]) -> T:
    """Run a wait in this event loop; its looks run in threads."""
    try:
        while True:
            advanced = await in_thread(lambda: _advance(wait))
            if isinstance(advanced, _Ended):
                return advanced.result
            await asyncio.sleep(advanced)
    finally:
        await in_thread(wait.close)


async def in_thread(work: Callable[[], T]) -> T:
    """Run file work in a thread, to its end even when this task is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # the cancellation goes first; asyncio must not report it as never retrieved
        raise cancelled
    return task.result()


@dataclass(frozen=True, slots=True)
class _Ended(Generic[T]):
    result: T


def _advance(wait: Wait[T]) -> "float | _Ended[T]":
    try:
        return next(wait)
    except StopIteration as end:
        return _Ended(end.value)
