"""A server that a hook starts and stops, with everything that it starts itself.

The server runs under a small program, this module, which holds the reading end of a pipe. Once the follower closes
the other end, or ends in whatever way, that program ends the server's group of processes: a server that nobody steers
any more would keep its port and its GPUs.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from explorer_hooks.hooks.process import signal_group
from syncd.errors import ConfigError, EngineUnreachableError

_STDERR = 2

KILLED = 5.0  # seconds for what SIGKILL does: a process that a dead mount blocks cannot be killed


class ServerProcess:
    """One server at a time, started by a command.

    Args:
        stop_timeout: Seconds between SIGTERM and SIGKILL.
        log: A file to which its output is appended; None for this process's standard error.
    """

    def __init__(self, stop_timeout: float, log: str | None = None) -> None:
        self._stop_timeout, self._log = stop_timeout, log
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    @property
    def end(self) -> str:
        """Return how the last server ended, for messages; empty if none has."""
        code = self._guard.poll() if self._guard is not None else None
        if code is None:
            return ""
        shown = f"ended with {code}" if code < _SIGNALLED else f"was killed by signal {code - _SIGNALLED}"
        return f"{shown}, see {self._log}" if self._log else shown

    def start(self, argv: Sequence[str]) -> None:
        guard = [sys.executable, "-P", "-m", __name__, str(self._stop_timeout), *argv]
        with contextlib.ExitStack() as opened:
            out: BinaryIO | int = _STDERR
            if self._log:
                try:
                    out = opened.enter_context(open(self._log, "ab"))
                except OSError as error:
                    why = f"the server's log cannot be written: {error.strerror}"
                    raise ConfigError(why, path=self._log, hint="server_log=FILE") from error
            try:
                self._guard = subprocess.Popen(  # noqa: S603 - the user's own command is what it is for
                    guard,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineUnreachableError(f"the server cannot be started: {error}") from error

    def stop(self) -> bool:
        """End the server and all that it started; return whether they have; if not, call it again."""
        guard = self._guard
        if guard is None:
            return True
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(self._stop_timeout + 2 * KILLED)
        except subprocess.TimeoutExpired:
            return False
        self._guard = None
        return True


_SIGNALLED = 128  # what is added to the number of the signal that has ended a server


def main(stop_timeout: str, *argv: str) -> int:
    """Run a server until it ends or the standard input does; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the pipe says when to end; the server has the default again
    try:
        server = subprocess.Popen(  # noqa: S603 - the user's own command
            argv, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start {argv[0]}: {error}")
    ended = os.pidfd_open(server.pid)
    select.select([ended, sys.stdin.fileno()], [], [])
    _end_group(server, ended, float(stop_timeout))
    code = server.wait()
    return code if code >= 0 else _SIGNALLED - code


def _end_group(server: "subprocess.Popen[bytes]", ended: int, stop_timeout: float) -> None:
    # The leader was not reaped yet, so its process id cannot belong to another group.
    signal_group(server.pid, signal.SIGTERM)
    select.select([ended], [], [], stop_timeout)
    signal_group(server.pid, signal.SIGKILL)
    until = time.monotonic() + KILLED
    while _others_live(server.pid) and time.monotonic() < until:
        time.sleep(0.02)


def _others_live(process_group: int) -> bool:
    """Return whether a group has processes besides a leader that has ended and was not reaped."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, pgrp = file.read().rpartition(b")")[2].split()[:3]
            if int(pgrp) == process_group and state not in (b"Z", b"X"):
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
