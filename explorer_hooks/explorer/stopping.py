"""SIGTERM and SIGINT end an explorer cleanly; a second one ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AT_ONCE = 128


class Stop:
    """Says whether to stop; calling it is asking."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> bool:
        """Say whether to stop."""
        return self._told

    def tell(self, number: int, _frame: FrameType | None = None) -> None:
        """Hear a signal.

        Raises:
            SystemExit: It is the second one.
        """
        if self._told:
            raise SystemExit(_AT_ONCE + number)
        self._told = True

    @contextmanager
    def heard(self) -> Iterator["Stop"]:
        """Hear signals inside."""
        before = {number: signal.signal(number, self.tell) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
