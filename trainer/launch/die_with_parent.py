"""Runs a command that the kernel ends with the process that started it.

    python -P die_with_parent.py SIGNAL PARENT COMMAND [ARGUMENT ...]

Linux sends SIGNAL when the thread that started the command ends, even by kill -9, so no rank
outlives its trainer. The command keeps the process id. It is a separate program because nothing may run between
fork and exec in a process that has threads. It is started by its path, so no other package named trainer is met.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def dying_with_parent(number: signal.Signals, command: Sequence[str]) -> list[str]:
    """Return the command line of `command` that gets a signal when the calling thread ends."""
    return [
        sys.executable,
        "-P",
        __file__,
        str(number.value),
        str(os.getpid()),
        *command,
    ]


def main(number: str, parent: str, *command: str) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != int(parent):  # it ended before prctl
        os.kill(os.getpid(), int(number))
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's own


if __name__ == "__main__":
    main(*sys.argv[1:])
