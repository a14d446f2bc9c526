"""Signals that ask to stop: SIGTERM, Ctrl-C, and SIGUSR2, which Slurm sends before a job's time is up."""

import contextlib
import os
import signal
import socket
from types import FrameType
from typing import Any, NoReturn, Self

from syncd.context import Closing

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

STOPPED = 75  # exit code after a request to stop: a checkpoint is saved, and the next start resumes from it
INTERRUPTED = 130  # exit code after Ctrl-C, where nothing was saved


class StopSignals(Closing):
    """Records requests to stop while it is open; the loop reads `requested` when it can save.

    A second Ctrl-C raises KeyboardInterrupt. `close` restores the earlier handlers. Use it in the main thread.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested == signal.SIGINT == number, number
        if again:
            raise KeyboardInterrupt


def end_at_once() -> None:
    """Make a request to stop end the process at once; call it before `StopSignals` opens, while nothing can be saved.

    Importing torch and meeting the other ranks takes minutes on a large machine, as much as Slurm's notice.
    """
    for number in SIGNALS:
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # Raised, it could be swallowed by whatever is being imported.
    os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ranks get too. A terminal that closes (SIGHUP) asks to end."""


class SignalInbox(Closing):
    """Keeps the signals of `PASSED_ON` in order until they are read; nothing runs in a handler. For the main thread.

    `fileno()` is readable when a signal has come. A signal that was ignored before, as under nohup, stays ignored.
    """

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, _only_wake)
            for number in PASSED_ON
            if signal.getsignal(number) != signal.SIG_IGN
        }
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def close(self) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call, oldest first."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(byte) for byte in self._reader.recv(4096) if byte in self._before]
        return []


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number to the pipe."""
