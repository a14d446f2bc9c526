"""Counts and limits the bytes that a mirror moves, and ends its work when it is told to stop."""

import threading

from syncd.protocol.disk import Clock

_SLICE = 0.25


class StoppedError(Exception):
    """The mirror was told to stop."""


class Meter:
    """What all threads of a mirror move: `rate` bytes a second on average, 0 for any, until `stop` is set."""

    def __init__(self, clock: Clock, rate: int, stop: threading.Event) -> None:
        self._clock, self.rate, self._stop = clock, rate, stop
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()
        self.moved = 0

    def spend(self, size: int) -> None:
        """Wait until so many bytes may be moved; what is moved in one piece goes at once, and the next one waits."""
        with self._lock:
            begin = max(self._clock.monotonic(), self._free_at)
            self._free_at = begin + (size / self.rate if self.rate else 0.0)
            self.moved += size
        self.check()
        while (left := begin - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, _SLICE))
            self.check()

    def check(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def is_stopped(self) -> bool:
        return self._stop.is_set()
