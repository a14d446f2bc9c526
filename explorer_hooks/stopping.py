"""On SIGTERM or SIGINT a process ends cleanly; on a second signal it ends at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_AT_ONCE = 128


class Stop:
    """Becomes true at the first signal; the second one raises what `at_once` returns. Call it to read it."""

    def __init__(
        self, at_once: Callable[[int], BaseException] = lambda number: SystemExit(_AT_ONCE + number)
    ) -> None:
        self._at_once = at_once
        self._is_set = self._requested = False

    def __call__(self) -> bool:
        return self._is_set or self._requested

    @property
    def is_signalled(self) -> bool:
        return self._is_set

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        if self._is_set:
            raise self._at_once(number)
        self._is_set = True

    def request(self) -> None:
        """Stop; a signal that comes later counts as the first."""
        self._requested = True

    @contextmanager
    def on_signals(self) -> Iterator["Stop"]:
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
