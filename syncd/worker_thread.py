"""Work in a thread of its own, for whoever must not be kept where the work may be: standing in the kernel."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """One piece of work in its own thread, which never keeps the process from ending.

    Args:
        work: What is done.
        name: The thread's name.
        ended: Called in that thread at the end, however it ends.
    """

    def __init__(
        self, work: Callable[[], T], name: str = "work", ended: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._ended = work, ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def identity(self) -> int | None:
        """Return the thread's identity."""
        return self._thread.ident

    @property
    def goes_on(self) -> bool:
        """Say whether it has not ended."""
        return not self._done.is_set()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait so long for its end; say whether it has come."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Return what has come of it, once it has ended, or raise what it has ended with."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result raises it
            self._error = error
        finally:
            self._done.set()
            self._ended()
