"""Work and loads keep out of each other's way: many may work at once, a load only while nobody does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from syncd.errors import EngineUnreachableError, SyncdError


class Gate:
    """Open to those who work until a load shuts it; every wait is bounded.

    A load that waits goes before work that comes later. A thread that works already may begin again inside.

    Args:
        timeout: Seconds that either side waits for the other.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._working = 0
        self._shut = False
        self._reason: SyncdError | None = None
        self._mine = threading.local()

    @property
    def is_shut(self) -> bool:
        """Say whether work has to wait."""
        return self._shut

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work inside.

        Raises:
            EngineUnreachableError: It stays shut for longer than the time-out.
            SyncdError: What it was shut for good with.
        """
        inside = getattr(self._mine, "depth", 0)
        if not inside:
            self._enter()
        self._mine.depth = inside + 1
        try:
            yield
        finally:
            self._mine.depth = inside
            if not inside:
                self._leave()

    def shut(self) -> None:
        """Shut it and wait until nobody works inside; if that takes too long it is open again.

        Raises:
            EngineUnreachableError: Somebody works for longer than the time-out.
        """
        with self._changed:
            was, self._shut = self._shut, True
            if self._changed.wait_for(lambda: not self._working, self._timeout):
                return
            self._shut = was
            self._changed.notify_all()
        raise EngineUnreachableError(f"a generation has not ended within {self._timeout:g} s")

    def open(self) -> None:
        """Let everybody in."""
        with self._changed:
            self._shut, self._reason = False, None
            self._changed.notify_all()

    def shut_for_good(self, reason: SyncdError) -> None:
        """Let nobody in until it is opened; whoever comes or waits is told why."""
        with self._changed:
            self._shut, self._reason = True, reason
            self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._shut or self._reason, self._timeout):
                raise EngineUnreachableError(f"a load has not ended within {self._timeout:g} s")
            if self._reason is not None:
                raise self._reason
            self._working += 1

    def _leave(self) -> None:
        with self._changed:
            self._working -= 1
            self._changed.notify_all()
