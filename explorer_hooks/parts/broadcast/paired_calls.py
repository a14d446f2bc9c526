"""Calls that have another half, and so run in a thread: a request to an engine, or joining a group."""

import threading
import time
from collections.abc import Callable, Sequence

from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError, SyncdError
from syncd.parts.broadcast.group_calls import Failure

_POLL = 0.002


class EngineRequest:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._failure = Failure()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="engine-call", daemon=True).start()

    def is_healthy(self) -> bool:
        if self._ended.is_set():
            self._failure.raise_once()
        return True

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, with or without an error, `seconds` at most."""
        self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            self._call()
        except SyncdError as error:
            # The error must not keep this thread's frames, and with them the group, if nobody asks for it.
            self._failure.keep(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - the thread that waits would wait for ever
            self._failure.keep(LoadFailedError(f"it failed: {type(error).__name__}: {error}"))
        finally:
            del self._call  # with it go the tensors that it used, before whoever waits gives up their memory
            self._ended.set()


def wait_for_all(requests: Sequence[EngineRequest], deadline: Deadline) -> None:
    while not all(request.has_ended for request in requests):
        for request in requests:
            request.is_healthy()
        if deadline.left() <= 0:
            raise LoadFailedError(f"the engine did not answer within {deadline.seconds:g} s")
        time.sleep(_POLL)
    for request in requests:
        request.is_healthy()
