"""Polls a job in one thread for everybody who asks: a reading that never returns blocks no request."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from syncd.errors import SyncdError, storage_error
from syncd.protocol.disk import Clock
from syncd.stall.calls import STUCK_AFTER

Document = Mapping[str, Any]

_IDLE = 60.0


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
    """What is known of the job now.

    Args:
        document: What the last poll that succeeded returned, None before the first.
        at: When that was, seconds since the epoch on this host's clock.
        age: Seconds since it began.
        looking_for: Seconds since the current poll began, None between two polls.
        error: The error of the newest poll that ended.
    """

    document: Document | None = None
    at: float | None = None
    age: float | None = None
    looking_for: float | None = None
    error: SyncdError | None = None

    @property
    def state(self) -> PollState:
        """Return how the newest poll ended."""
        if self.looking_for is not None and self.looking_for >= STUCK_AFTER:
            return PollState.STUCK
        if self.error is not None:
            return PollState.FAILING
        return PollState.FRESH if self.document is not None else PollState.STARTING


class SharedPoll:
    """Polls from one thread while somebody asks, and lets everybody who asks share the result.

    Args:
        read: Reads the job and returns a document.
        clock: This host's clock.
        every: Seconds between two polls at least.
    """

    def __init__(self, read: Callable[[], Document], clock: Clock, every: float) -> None:
        self._read, self._clock, self.every = read, clock, every
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._known = PollResult()
        self._began: float | None = None
        self._seen: float | None = None

    def start(self) -> None:
        """Begin; the thread never keeps the process from ending."""
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    def close(self) -> None:
        """Stop polling; a poll that has begun is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def current(self, patience: float) -> PollResult:
        """Return the latest result, after waiting a moment for a poll that is due.

        Args:
            patience: Seconds to wait for it at most.
        """
        with self._changed:
            if not self._is_due() or self._now().state is PollState.STUCK:
                return self._now()
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._wanted, patience)
            return self._now()

    def _is_due(self) -> bool:
        return self._seen is None or self._clock.monotonic() - self._seen >= self.every

    def _now(self) -> PollResult:
        now, known = self._clock.monotonic(), self._known
        age = None if self._seen is None or known.document is None else now - self._seen
        looking_for = None if self._began is None else now - self._began
        return PollResult(known.document, known.at, age, looking_for, known.error)

    def _run(self) -> None:
        while self._is_asked():
            began, at = self._begin()
            try:
                found = self._read()
            except SyncdError as error:
                self._fail(error)
            except OSError as error:
                self._fail(storage_error(error, None))
            except Exception as error:  # noqa: BLE001 - the page shows it, and the next poll may succeed
                self._fail(SyncdError(f"a bug in syncd: {type(error).__name__}: {error}"))
            else:
                self._end(PollResult(found, at), began)
            self._rest()

    def _is_asked(self) -> bool:
        with self._changed:
            while not (self._wanted or self._closed):
                self._changed.wait(_IDLE)
            return not self._closed

    def _begin(self) -> tuple[float, float]:
        with self._changed:
            self._began = self._clock.monotonic()
            return self._began, self._clock.time()

    def _fail(self, error: SyncdError) -> None:
        self._end(PollResult(self._known.document, self._known.at, error=error), self._seen)

    def _end(self, known: PollResult, seen: float | None) -> None:
        with self._changed:
            self._known, self._seen, self._began, self._wanted = known, seen, None, False
            self._changed.notify_all()

    def _rest(self) -> None:
        """Leave the mount alone between two polls, however many ask."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, self.every)
