"""Signals as messages: what arrives is kept, in order, until somebody looks; nothing runs in a handler."""

import contextlib
import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""What ranks are told of. A terminal that closes (SIGHUP) asks to end."""


class Inbox:
    """Takes the signals of `PASSED_ON` while it is open; the main thread's only.

    `fileno()` becomes readable when one has come. A signal that was ignored before, as under nohup, stays so.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Return what has come since the last look, oldest first."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(byte) for byte in self._reader.recv(4096) if byte in self._before]
        return []


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number to the pipe."""
