"""What is done in a thread of its own because it has another half: a request to an engine, the joining of a group."""

import threading
import time
from collections.abc import Callable

from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError, SyncdError
from syncd.transports.broadcast.failing import Failure

_LOOK = 0.002


class Call:
    """One piece of work that is under way.

    Args:
        work: Does it, within a time-out of its own.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._failure = Failure()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="engine-call", daemon=True).start()

    def goes_on(self) -> bool:
        """Say that it has not failed.

        Raises:
            SyncdError: It has; said once.
        """
        if self._ended.is_set():
            self._failure.tell()
        return True

    @property
    def is_over(self) -> bool:
        """Say whether it has ended, whatever came of it."""
        return self._ended.is_set()

    def settle(self, seconds: float) -> None:
        """Wait until it is over, whatever comes of it, `seconds` at most."""
        self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            self._work()
        except SyncdError as error:
            # Nor may it refer to this thread's own work, where nobody asks any more.
            self._failure.keep(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would be waited for
            self._failure.keep(LoadFailedError(f"it failed: {type(error).__name__}: {error}"))
        finally:
            self._ended.set()


def finish(calls: tuple[Call, ...], deadline: Deadline) -> None:
    """Wait until all are done; one that fails ends the wait for the others.

    Raises:
        LoadFailedError: They are not, in time.
        SyncdError: One of them failed.
    """
    while not all(call.is_over for call in calls):
        for call in calls:
            call.goes_on()
        if deadline.left() <= 0:
            raise LoadFailedError(f"the engine did not do its part within {deadline.seconds:g} s")
        time.sleep(_LOOK)
    for call in calls:
        call.goes_on()
