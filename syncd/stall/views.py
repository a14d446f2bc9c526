"""Looks that are not waited for without end: a mount that does not answer holds a thread up, not the command."""

from collections.abc import Callable
from typing import Any, TypeVar

from syncd.errors import StuckError
from syncd.protocol.disk import Clock
from syncd.stall.calls import IS_IT_UP, Call, InHand
from syncd.worker_thread import Work

T = TypeVar("T")

_EVERY = 0.25


class Attended:
    """Does what may stand in the kernel in a thread of its own, one thing at a time.

    Args:
        in_hand: What is asked of the file system.
        clock: This host's clock.
        patience: Seconds that one operation of the file system is waited for.
    """

    def __init__(self, in_hand: InHand, clock: Clock, patience: float) -> None:
        self._in_hand, self._clock, self._patience = in_hand, clock, patience
        self._now: Work[Any] | None = None

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what the work returns; it takes as long as it goes on.

        Args:
            work: What asks the file system.

        Raises:
            StuckError: One operation has not come back in time. What was begun is then waited for by the next call.
        """
        if self._now is not None:
            self._wait(self._now)
        self._now = begun = Work(work, "look")
        begun.start()
        self._wait(begun)
        self._now = None
        return begun.result()

    def _wait(self, work: Work[Any]) -> None:
        while not work.wait(min(_EVERY, self._patience)):
            call = self._in_hand.oldest()
            if call is not None and self._in_hand.age(call) >= self._patience:
                raise _stuck(call, self._in_hand.age(call))


def _stuck(call: Call, seconds: float) -> StuckError:
    return StuckError(
        f"the mount has not answered for {seconds:.0f} s ({call.what})",
        path=call.path,
        hint=IS_IT_UP,
    )
