"""Being asked to stop: SIGTERM, Ctrl-C, and SIGUSR2, which Slurm sends ahead of the end of a job's time."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

STOPPED = 75
"""Exit code after a request to stop: what was trained is saved, start again to go on."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, where nothing was saved."""


class StopSignals:
    """Takes requests to stop while it is open; the loop looks at `requested` when it can save.

    A second Ctrl-C raises KeyboardInterrupt. The handlers from before are back at the end. For the main thread.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested == signal.SIGINT == number, number
        if again:
            raise KeyboardInterrupt


def end_at_once() -> None:
    """Until `StopSignals` is open there is nothing to save: make a request to stop end the process.

    Importing torch and meeting the other ranks takes minutes on a large machine, as much as Slurm's notice.
    """
    for number in SIGNALS:
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # Raised, it could be swallowed by whatever is being imported.
    os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)
