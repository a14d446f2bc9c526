"""A child process that goes on with the command, and what its parent sees of it without asking any mount."""

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import sys
from types import FrameType

from syncd.closing import Closing
from syncd.protocol.attended import Call
from syncd.protocol.disk import SystemClock

_INTERRUPT = signal.SIGUSR1
"""Ctrl-C reaches both processes, `kill -INT` one of them: the child hears of either by this, once."""

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_SIZE = 8192
_COUNT = struct.Struct("=Q")
_HEAD = struct.Struct("=dd?HH")
_TEXT = _COUNT.size + _HEAD.size
_ATTEMPTS = 1000
_MOMENTS = 3


class Board:
    """Shared memory that shows the call that the child has in hand, and whether one of its calls changes anything."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._count = 0

    def write(self, call: Call | None, changing: bool) -> None:
        """Show a call; the count is odd while it is being written."""
        self._count += 2
        _COUNT.pack_into(self._memory, 0, self._count - 1)
        what = call.what.encode() if call else b""
        path = os.fsencode(call.path)[: _SIZE - _TEXT - len(what)] if call else b""
        since, allowance = (call.since, call.allowance) if call else (0.0, 0.0)
        _HEAD.pack_into(self._memory, _COUNT.size, since, allowance, changing, len(what), len(path))
        self._memory[_TEXT : _TEXT + len(what) + len(path)] = what + path
        _COUNT.pack_into(self._memory, 0, self._count)

    def read(self) -> tuple[Call | None, bool]:
        """Return what is shown; a call that changes too fast to be read is none that is stuck."""
        for _ in range(_ATTEMPTS):
            before = _COUNT.unpack_from(self._memory)
            found = self._decoded()
            if before[0] % 2 == 0 and before == _COUNT.unpack_from(self._memory):
                return found
        return None, True

    def _decoded(self) -> tuple[Call | None, bool]:
        since, allowance, changing, what, path = _HEAD.unpack_from(self._memory, _COUNT.size)
        text = self._memory[_TEXT : _TEXT + what + path]
        name = text[:what].decode("ascii", "replace")
        return (Call(name, os.fsdecode(text[what:]), since, allowance) if what else None), changing


class Child(Closing):
    """The process that does the work. It never outlives this one, but where the kernel keeps it.

    Args:
        pid: Its number.
        leash: A descriptor that is open as long as this process lives.
        ended: One that is at its end when the child is.
    """

    def __init__(self, pid: int, leash: int, ended: int) -> None:
        self._pid, self._leash, self._clock = pid, leash, SystemClock()
        self._ended = ended
        self._poll = select.poll()
        self._poll.register(ended, select.POLLIN)
        self._code: int | None = None
        self._ends_without_its_threads = 0
        self.told: int | None = None
        self.told_at = 0.0
        self._before = {number: signal.getsignal(number) for number in _PASSED_ON}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def has_ended(self, seconds: float) -> bool:
        """Wait so long for its end; say whether it has come."""
        if self._poll.poll(seconds * 1000):
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        else:
            self._code = self._left()
        return self._code is not None

    def code(self) -> int:
        """Return the exit code to end with once it has ended; a signal that ended it ends this process too."""
        code = self._code or 0
        if code >= 0:
            return code
        if self.told == signal.SIGINT and -code == _INTERRUPT:  # it was no further than to be born
            return 128 + signal.SIGINT
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code

    def kill(self) -> None:
        """End it; where a call keeps it in the kernel, once that call comes back, and it does nothing more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Watch it no longer."""
        if self._code is None:
            self.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._leash)
        os.close(self._ended)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.told is None:
            self.told, self.told_at = number, self._clock.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, _INTERRUPT if number == signal.SIGINT else number)

    def _left(self) -> int | None:
        """Return the exit code of a child of which only threads are left, in the kernel."""
        with open(f"/proc/{self._pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        # Threads that end well are gone a moment after their process.
        self._ends_without_its_threads += fields[0] == "Z"
        if self._ends_without_its_threads < _MOMENTS:
            return None
        return os.waitstatus_to_exitcode(int(fields[-1]))


def start() -> Child | None:
    """Return the child in this process, and None in the child, which goes on."""
    leash, ended = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        pid = os.fork()
        if pid == 0:
            os.close(leash[1])
            os.close(ended[0])
            _settle(leash[0], parent)
            return None
        os.close(leash[0])
        os.close(ended[1])
        return Child(pid, leash[1], ended[0])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle(leash: int, parent: int) -> None:
    """Make this process a child: it ends with its parent, and is interrupted by it alone."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)
    if os.getppid() != parent:  # it is gone already
        os.kill(os.getpid(), signal.SIGKILL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(_INTERRUPT, signal.default_int_handler)
        signal.signal(signal.SIGINT, _do_nothing)


def _do_nothing(_: int, __: FrameType | None) -> None:
    """Ignore a signal, but not in programs that this process starts."""
