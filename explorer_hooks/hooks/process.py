"""Runs one command: without a shell, bounded in time and in output, and killed with all that it started."""

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from syncd.errors import EngineUnreachableError

# The last bytes of each stream that are kept: an agent's reward may have an info of half of them.
KEPT = 64 << 10
GRACE = 2.0  # seconds between SIGTERM and SIGKILL to a group of processes
_AFTER = 0.2  # seconds to read the pipes after the command has ended but a process that it started has not

_PIECE = 1 << 16

_LOOK = 0.5  # seconds between two looks whether to stop


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended: its exit code, None if it timed out, and the end of its output on each stream."""

    code: int | None
    out: str
    err: str


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    stop: Callable[[], bool] = lambda: False,
    *,
    inherited: Mapping[str, str] = os.environ,
    stdin: bytes = b"",
) -> CommandEnd:
    """Run a command in a new process group, which is killed if the command times out.

    Processes that it leaves behind keep running if it ends in time.

    Args:
        timeout: Seconds.
        stop: Polled; once it returns true, the command counts as timed out.
        inherited: Variables that it inherits; all of this process unless given.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command is what it is for
            argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited, **environment},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise EngineUnreachableError(f"cannot start {argv[0]}: {error}") from error
    ended = False
    try:
        tails, ended = _follow(process, time.monotonic() + timeout, stop, memoryview(stdin))
    finally:
        if not ended:
            kill_group(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return CommandEnd(
        process.returncode if ended else None, *(tail.decode("utf-8", "replace") for tail in tails)
    )


def _follow(
    process: "subprocess.Popen[bytes]", deadline: float, stop: Callable[[], bool], unwritten: memoryview
) -> tuple[tuple[bytearray, bytearray], bool]:
    """Pass a command's input on and read its output until it ends or times out; return that and whether it ended."""
    tails, ended = (bytearray(), bytearray()), False
    with selectors.DefaultSelector() as selector, end_of(process) as end:
        for stream, tail in zip((process.stdout, process.stderr), tails, strict=True):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, tail)
        selector.register(end, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0 and not stop():
            for key, _ in selector.select(min(left, _LOOK)):
                if key.fileobj is process.stdin:
                    unwritten = unwritten[_written(key.fd, unwritten) :]
                    if not unwritten:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif key.data is None:
                    process.wait()
                    ended, deadline = True, min(deadline, time.monotonic() + _AFTER)
                    selector.unregister(key.fileobj)
                elif piece := os.read(key.fd, _PIECE):
                    key.data.extend(piece)
                    del key.data[:-KEPT]
                else:
                    selector.unregister(key.fileobj)
    return tails, ended


def _written(descriptor: int, data: memoryview) -> int:
    """Write a part of a command's input; return how much of it is done: all if the command does not read it."""
    try:
        return os.write(descriptor, data[:_PIECE])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


@contextlib.contextmanager
def end_of(process: "subprocess.Popen[bytes]") -> Iterator[int]:
    """Yield a descriptor that becomes readable when the process ends."""
    descriptor = os.pidfd_open(process.pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to a group whose leader was not reaped, SIGKILL once the leader ends or after `GRACE` seconds."""
    with end_of(process) as end:
        # The leader was not reaped yet, so its process id cannot belong to another group.
        signal_group(process.pid, signal.SIGTERM)
        ended = select.poll()  # `select` would not take a number of a file from 1024 on
        ended.register(end, select.POLLIN)
        ended.poll(1000 * GRACE)
        signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(
        subprocess.TimeoutExpired
    ):  # a process that a dead mount blocks cannot be killed
        process.wait(GRACE)


def signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
