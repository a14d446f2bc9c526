"""One thread for calls into somebody else's Python: in order, one at a time, each waited for within a bound."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from syncd.errors import EngineUnreachableError, TimedOutError


class Worker:
    """Makes calls in a thread of its own, always the same one.

    A call that outlasts its time cannot be stopped; what comes after it waits for it, within its own bound. One that
    had not begun when its time was over never will.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon: the interpreter must be able to end though a call does not.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], Any], timeout: float) -> Any:
        """Return what a call returns, or raise what it raises.

        Raises:
            EngineUnreachableError: The call before it has not ended; this one was not made.
            TimedOutError: It was made, and has not ended.
        """
        future: Future[Any] = Future()
        self._calls.put((future, function))
        wait([future], timeout)
        if not future.done() and future.cancel():
            raise EngineUnreachableError(f"the call before this one has not ended within {timeout:g} s")
        if not future.done():
            raise TimedOutError(f"the call has not ended within {timeout:g} s")
        return future.result(0)

    def close(self) -> None:
        """Have the thread end after what it is doing."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            _settle(*item)


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it is raised where it was waited for
        future.set_exception(error)
    else:
        future.set_result(result)
