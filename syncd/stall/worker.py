"""Work in a separate thread, for callers that must not hang where the work hangs: in a call to a dead mount."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from syncd.errors import StuckError
from syncd.protocol.disk import Clock
from syncd.stall.calls import MOUNT_HINT, DiskCall, PendingCalls

T = TypeVar("T")

_EVERY = 0.25


class WorkerThread(Generic[T]):
    """Work in its own thread, which never keeps the process from ending; however it ends, it calls `ended`."""

    def __init__(
        self, work: Callable[[], T], name: str = "work", ended: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._ended = work, ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def identity(self) -> int | None:
        return self._thread.ident

    @property
    def is_running(self) -> bool:
        return not self._done.is_set()

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the work, for so many seconds at most; return whether it has ended."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Return the result of work that has ended, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result raises it
            self._error = error
        finally:
            self._done.set()
            self._ended()


@dataclass(frozen=True, slots=True)
class CallWait:
    """The wait for one call, as the watching thread sees it."""

    call: DiskCall  # the call that has been pending for longest
    seconds: float  # seconds since it was made
    waited: float  # seconds of these in which this process ran: it may have been stopped, or the host asleep
    elapsed: float  # seconds since the work began

    def __str__(self) -> str:
        return f"the mount has not answered for {self.seconds:.0f} s"


def watch_calls(
    work: WorkerThread[Any], calls: PendingCalls, clock: Clock, every: float = _EVERY
) -> Iterator[CallWait]:
    """Yield the wait for the oldest pending call, at polls `every` seconds apart, until the work has ended."""
    began = last = clock.monotonic()
    previous, waited = None, 0.0
    while not work.wait(every):
        call, now = calls.oldest(), clock.monotonic()
        waited = waited + min(now - last, 2 * every) if call == previous else 0.0
        previous, last = call, now
        if call is not None:
            yield CallWait(call, now - call.since, waited, now - began)


class StallGuard:
    """Runs work in a thread, one piece at a time; raises when a call to the file system takes `patience` seconds."""

    def __init__(self, calls: PendingCalls, clock: Clock, patience: float) -> None:
        self._calls, self._clock, self._patience = calls, clock, patience
        self._unfinished: WorkerThread[Any] | None = None

    def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of the work, which may take any time as long as its calls return."""
        if self._unfinished is not None:
            self._wait(self._unfinished)
        self._unfinished = thread = WorkerThread(work, "look")
        thread.start()
        self._wait(thread)
        self._unfinished = None
        return thread.result()

    def _wait(self, thread: WorkerThread[Any]) -> None:
        for wait in watch_calls(thread, self._calls, self._clock, min(_EVERY, self._patience)):
            if wait.seconds >= self._patience:
                raise StuckError(f"{wait} ({wait.call.what})", path=wait.call.path, hint=MOUNT_HINT)
