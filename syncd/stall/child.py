"""A child process that goes on with the command, and what its parent sees of it without asking any mount."""

import contextlib
import fcntl
import gc
import mmap
import os
import select
import signal
import stat
import struct
import sys
from types import FrameType

from syncd.console import CLOSED_PIPE
from syncd.context import Closing
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import Call

_INTERRUPT = signal.SIGUSR1
"""Ctrl-C reaches both processes, `kill -INT` one of them: the child hears of either by this, once."""

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_SIZE = 8192
_COUNT = struct.Struct("=Q")
_SINCE = struct.Struct("=d")
_HEAD = struct.Struct("=dd?HH")
_TEXT = _COUNT.size + _HEAD.size
_ATTEMPTS = 1000
_MOMENTS = 3


class Board:
    """Shared memory that shows the call that the child has in hand, and whether one of its calls changes anything."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._count = 0

    def write(self, call: Call | None, changing: bool) -> None:  # noqa: FBT001
        """Show a call, or that there is none. The count is odd while a call is being written."""
        if call is None:
            _SINCE.pack_into(self._memory, _COUNT.size, 0.0)
            return
        self._count += 2
        _COUNT.pack_into(self._memory, 0, self._count - 1)
        what = call.what.encode()
        path = os.fsencode(call.path)[: _SIZE - _TEXT - len(what)]
        _HEAD.pack_into(self._memory, _COUNT.size, call.since, call.allowance, changing, len(what), len(path))
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
        return (Call(name, os.fsdecode(text[what:]), since, allowance) if since else None), changing


class Relays:
    """Pipes of our own in the place of those that the command writes to.

    A child that the kernel keeps would keep those open: whoever reads would wait for it, although the command has
    ended. Terminals and files have no readers that wait for an end, and stay as they are.
    """

    def __init__(self) -> None:
        self._pipes = {target: os.pipe() for target in (1, 2) if _has_reader(target)}

    def write_into(self) -> None:
        """Write into them from now on: this process is the child."""
        for target, (source, sink) in self._pipes.items():
            os.dup2(sink, target)
            os.close(sink)
            os.close(source)

    def read_from(self) -> dict[int, int]:
        """Return what to read, with where it belongs: this process is the parent."""
        for _, sink in self._pipes.values():
            os.close(sink)
        return {source: target for target, (source, _) in self._pipes.items()}


class Child(Closing):
    """The process that does the work. It never outlives this one, but where the kernel keeps it.

    Args:
        pid: Its number.
        leash: A descriptor that is open as long as this process lives.
        ended: One that is at its end when the child is.
        relayed: What it writes to pipes, with where it belongs.
    """

    def __init__(self, pid: int, leash: int, ended: int, relayed: dict[int, int]) -> None:
        self._pid, self._leash, self._clock = pid, leash, SystemClock()
        self._ended, self._relayed = ended, relayed
        self._poll = select.poll()
        for descriptor in (ended, *relayed):
            self._poll.register(descriptor, select.POLLIN)
        self._code: int | None = None
        self._is_unread = False
        self._ends_without_its_threads = 0
        self.told: int | None = None
        self.told_at = 0.0
        found = {number: signal.getsignal(number) for number in _PASSED_ON}
        self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._pass_on)

    def has_ended(self, seconds: float) -> bool:
        """Wait so long for its end; say whether it has come."""
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000)}
        for source in ready & set(self._relayed):
            self._relay(source)
        if self._ended in ready:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        elif not ready:
            self._code = self._left()
        if self._code is not None:
            self._drain()
        return self._code is not None

    def code(self) -> int:
        """Return the exit code to end with once it has ended; a signal that ended it ends this process too."""
        code = self._code or 0
        if code >= 0:
            return CLOSED_PIPE if self._is_unread and code == 0 else code
        if self.told == signal.SIGINT and -code == _INTERRUPT:  # it was no further than to be born
            return 128 + signal.SIGINT
        with contextlib.suppress(OSError):  # SIGKILL has no handler to be taken away
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
        for descriptor in (self._leash, self._ended, *self._relayed):
            os.close(descriptor)

    def _relay(self, source: int) -> bool:
        """Pass on what there is; say whether there may be more."""
        data = os.read(source, 1 << 16)
        try:
            _write_all(self._relayed[source], data)
        except OSError:  # whoever read has gone: a child that writes more hears of it
            data = b""
            self._is_unread = True
        if not data:
            self._poll.unregister(source)
            os.close(source)
            del self._relayed[source]
        return bool(data)

    def _drain(self) -> None:
        """Pass on what a child that has ended has left."""
        for source in list(self._relayed):
            os.set_blocking(source, False)
            with contextlib.suppress(BlockingIOError):
                while self._relay(source):
                    pass

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.told is None:
            self.told, self.told_at = number, self._clock.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, _INTERRUPT if number == signal.SIGINT else number)

    def _left(self) -> int | None:
        """Return the exit code of a child of which only threads are left, in the kernel."""
        try:
            with open(f"/proc/{self._pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        # Threads that end well are gone a moment after their process.
        self._ends_without_its_threads += fields[0] == "Z"
        if self._ends_without_its_threads < _MOMENTS:
            return None
        return os.waitstatus_to_exitcode(int(fields[-1]))


def _has_reader(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _write_all(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def start() -> Child | None:
    """Return the child in this process, and None in the child, which goes on."""
    leash, ended, relays = os.pipe(), os.pipe(), Relays()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the kernel forgets how a child ended
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    gc.freeze()  # what the child collects is its own: what it shares with this process is not touched
    try:
        pid = os.fork()
        if pid == 0:
            os.close(leash[1])
            os.close(ended[0])
            relays.write_into()
            _settle(leash[0], parent)
            return None
        os.close(leash[0])
        os.close(ended[1])
        return Child(pid, leash[1], ended[0], relays.read_from())
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
