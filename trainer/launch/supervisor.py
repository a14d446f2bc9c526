"""Starts the ranks of this machine and stays until all have ended.

Rank 0 has our terminal; the output of the others comes to our stderr, each line with the rank in front. Ranks meet at
a socket that listens before the first of them starts and that rank 0 inherits, so no other process can take the port.
Signals are passed on as they are. When a rank fails, the others get SIGTERM, and SIGKILL after a grace period.

torch's elastic agent is not used: it treats each exit code but 0 as a failure, turns SIGUSR2 and Ctrl-C into one
SIGTERM, prefixes lines by tailing files, and would import torch into this process.
"""

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from trainer.launch.die_with_parent import dying_with_parent
from trainer.launch.machine import settings
from trainer.launch.rank_env import LISTENING, STARTED_BY, RankEnv
from trainer.stopping import INTERRUPTED, STOPPED, SignalInbox

GRACE = 30.0  # seconds from SIGTERM to SIGKILL for the ranks that are left when one has failed

_BACKLOG = 1024
_ORDERLY = (0, STOPPED, INTERRUPTED)
_PATIENCE = 3  # the Ctrl-C that kills: the first asks ranks to save, the second to give up
_LAST_OUTPUT = 5.0  # seconds to read what an ended rank has printed

_PIECE = 1 << 16
_LONGEST = 1 << 16  # a longer line is cut: a rank that never ends a line must not fill our memory

_LINE_END = re.compile(rb"[\r\n]+")
_writing = threading.Lock()


def start_ranks(command: Sequence[str], nproc: int, environ: Mapping[str, str]) -> int:
    """Run a command as ranks 0 to nproc - 1 of this machine and return the exit code of the run.

    `read_rank_env` tells the command which rank it is. The code is that of the first rank that failed, 128 + n if
    signal n killed it; else 75 if a rank was asked to stop, else 0.
    """
    with SignalInbox() as inbox, RankSupervisor(inbox) as supervisor:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(_BACKLOG)
            port = listener.getsockname()[1]
            for rank in range(nproc):
                rank_env = RankEnv(rank, rank, nproc, nproc, "127.0.0.1", port, "trainer")
                supervisor.start(command, rank_env, {**environ, **settings(nproc, environ)}, listener)
        return supervisor.wait()


@dataclass(frozen=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    output: threading.Thread | None


class RankSupervisor:
    def __init__(self, inbox: SignalInbox) -> None:
        self._inbox = inbox
        self._living: dict[int, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)
        self._passed_on: set[signal.Signals] = set()
        self._interrupts = 0
        self._code = 0
        self._kill_at = float("inf")
        self._killed = self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the ranks that are left after an error here."""
        while self._living and not self._given_up:
            if not self._killed or time.monotonic() >= self._kill_at:
                self._kill()
            for rank in self._wait_for_ends():
                self._reap(rank)
        self._selector.close()

    def start(
        self, command: Sequence[str], rank_env: RankEnv, environ: Mapping[str, str], listener: socket.socket
    ) -> None:
        """Start one rank in a new process group, so that Ctrl-C reaches it once, through us."""
        source, entry = os.pipe() if rank_env.rank else (None, None)
        process = subprocess.Popen(  # noqa: S603 - the caller's command
            dying_with_parent(signal.SIGKILL, command),
            env={**environ, **rank_env.variables(), STARTED_BY: "trainer", LISTENING: str(listener.fileno())},
            pass_fds=[] if rank_env.rank else [listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=entry,
            stderr=entry,
            process_group=0,
        )
        output = None
        if source is not None and entry is not None:
            os.close(entry)
            prefix = f"[rank {rank_env.rank}] "
            arguments = (source, prefix.encode())
            output = threading.Thread(
                target=_copy_lines, args=arguments, name=f"output {prefix}", daemon=True
            )
            output.start()
        rank = _Rank(rank_env.rank, process, os.pidfd_open(process.pid), output)
        self._living[rank_env.rank] = rank
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def wait(self) -> int:
        while self._living and not self._given_up:
            ended = self._wait_for_ends()
            for number in self._inbox.read():
                self._pass_on(number)
            self._record([(rank, self._reap(rank)) for rank in ended])
            if time.monotonic() >= self._kill_at:
                self._kill()
        return self._code

    def _wait_for_ends(self) -> list[_Rank]:
        left = self._kill_at - time.monotonic()
        events = self._selector.select(None if left == float("inf") else max(left, 0.0))
        return [key.data for key, _ in events if key.data is not None]

    def _pass_on(self, number: signal.Signals) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self._passed_on.add(number)
        self._interrupts += number == signal.SIGINT
        self._send(number)
        if self._interrupts >= _PATIENCE:
            self._kill_at = time.monotonic()

    def _record(self, ended: list[tuple[_Rank, int]]) -> None:
        """Record how ranks ended; a killed one comes first, because it explains the errors of the others."""
        for rank, status in sorted(ended, key=lambda end: end[1]):
            code = self._exit_code(status)
            if self._code not in _ORDERLY:
                continue
            self._code = max(self._code, code) if code in _ORDERLY else code
            if code not in _ORDERLY:
                self._end_others(rank, status)

    def _exit_code(self, status: int) -> int:
        if status >= 0:
            return status
        if (
            -status in self._passed_on
        ):  # the signal came before the rank had handlers: there is nothing to save
            return INTERRUPTED if -status == signal.SIGINT else STOPPED
        return 128 - status

    def _end_others(self, rank: _Rank, status: int) -> None:
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with {status}"
        others = f"; ending the other {len(self._living)}" if self._living else ""
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + GRACE
        _print(f"error: rank {rank.number} (pid {rank.process.pid}) {how}{others}")
        if status == -signal.SIGKILL:
            _print("hint: dmesg | tail   # the kernel kills when memory runs out")

    def _send(self, number: signal.Signals) -> None:
        for rank in self._living.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, number)

    def _kill(self) -> None:
        """Kill the living ranks; give up on those that SIGKILL did not end within the grace period."""
        if self._killed:
            left = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in self._living.values())
            _print(f"error: {left} cannot be killed: it waits for a file system or a device")
        self._given_up, self._killed = self._killed, True
        self._send(signal.SIGKILL)
        self._kill_at = time.monotonic() + GRACE

    def _reap(self, rank: _Rank) -> int:
        """Return how a rank ended; kill its process group first, while no other process can have its number."""
        self._selector.unregister(rank.pidfd)
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        status = rank.process.wait()
        del self._living[rank.number]
        os.close(rank.pidfd)
        if rank.output is not None:
            # Not longer: a process that the rank has left behind may hold the pipe.
            rank.output.join(_LAST_OUTPUT)
        return status


def _copy_lines(source: int, prefix: bytes) -> None:
    rest = b""
    while piece := os.read(source, _PIECE):
        *lines, rest = _LINE_END.split(rest + piece)
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        _write_lines(lines, prefix)
    _write_lines([rest], prefix)
    os.close(source)


def _write_lines(lines: list[bytes], prefix: bytes) -> None:
    text = b"".join(b"%s%s\n" % (prefix, line) for line in lines if line)
    # If nobody reads us any more, or our disk is full, the output is dropped: ranks must not wait.
    with _writing, contextlib.suppress(OSError, ValueError):
        while text:
            text = text[os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text) :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _print(line: str) -> None:
    _write_lines([line.encode()], b"")
