"""Polls a job in one thread for everybody who asks: a reading that never returns blocks no request."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from syncd.errors import SyncdError, storage_error, unexpected
from syncd.protocol.disk import Clock
from syncd.stall.calls import STUCK_AFTER
from syncd.stall.worker import WorkerThread

Document = Mapping[str, Any]
T = TypeVar("T")


class PollState(StrEnum):
    """How the newest poll ended.

    starting: none has ended yet. fresh: it succeeded. failing: it ended with an error. stuck: it takes longer than
    a mount that works would take.
    """

    STARTING = "starting"
    FRESH = "fresh"
    FAILING = "failing"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class PollResult:
    document: Document | None = None  # what the last poll that succeeded returned, None before the first
    at: float | None = None  # when that was, seconds since the epoch on this host's clock
    age: float | None = None  # seconds since it began
    looking_for: float | None = None  # seconds since the current poll began, None between two polls
    error: SyncdError | None = None  # the error of the newest poll that ended

    @property
    def state(self) -> PollState:
        if self.looking_for is not None and self.looking_for >= STUCK_AFTER:
            return PollState.STUCK
        if self.error is not None:
            return PollState.FAILING
        return PollState.FRESH if self.document is not None else PollState.STARTING


class SharedPoll:
    """Polls while somebody asks, one at a time, `every` seconds after the last at least; all share the result."""

    def __init__(self, read: Callable[[], Document], clock: Clock, every: float) -> None:
        self._read, self._clock, self._every = read, clock, every
        self._lock = threading.Lock()
        self._result = PollResult()
        self._work: WorkerThread[None] | None = None
        self._began = self._due = self._seen = float("-inf")

    def current(self, patience: float) -> PollResult:
        """Return the latest result, after waiting up to `patience` seconds for a poll that is due."""
        with self._lock:
            if self._work is None and self._clock.monotonic() >= self._due:
                self._began = self._clock.monotonic()
                self._work = WorkerThread(self._poll, "poll")
                self._work.start()
            work = self._work
        if work is not None and self._now().state is not PollState.STUCK:
            work.wait(patience)
        return self._now()

    def _now(self) -> PollResult:
        with self._lock:
            now, result = self._clock.monotonic(), self._result
            age = None if result.document is None else now - self._seen
            return replace(result, age=age, looking_for=None if self._work is None else now - self._began)

    def _poll(self) -> None:
        at, error, document = self._clock.time(), None, None
        try:
            document = self._read()
        except SyncdError as known:
            error = known
        except OSError as failure:
            error = storage_error(failure, None)
        except Exception as bug:  # noqa: BLE001 - the page shows it, and the next poll may succeed
            error = unexpected(bug)
        with self._lock:
            if document is not None:
                self._result, self._seen = PollResult(document, at), self._began
            else:
                self._result = replace(self._result, error=error)
            self._work, self._due = None, self._clock.monotonic() + self._every


def poll_all(polls: Sequence[SharedPoll], clock: Clock, patience: float) -> list[PollResult]:
    """Return the result of each poll; those that are due are waited for together, up to `patience` seconds."""
    for poll in polls:
        poll.current(0.0)
    ends = clock.monotonic() + patience
    return [poll.current(max(ends - clock.monotonic(), 0.0)) for poll in polls]


class SingleCall(Generic[T]):
    """Makes one call at a time in a thread: a call that never returns costs one thread and blocks no request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._work: WorkerThread[T] | None = None

    def result(self, key: Hashable, call: Callable[[], T], patience: float) -> T | None:
        """Return the result of a call, None if it, or a call with another key, runs for longer than `patience`.

        Who asks again with the same key gets the result of the call that was begun.
        """
        with self._lock:
            if self._work is None or (key != self._key and not self._work.is_running):
                self._key, self._work = key, WorkerThread(call, "call")
                self._work.start()
            work, is_mine = self._work, key == self._key
        if not work.wait(patience) or not is_mine:
            return None
        with self._lock:
            self._work = None if self._work is work else self._work
        return work.result()
