"""Stays with the ranks of one machine until they have ended: passes signals on, ends the others when one fails."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from trainer.launch.die_with_parent import tethered
from trainer.launch.log_prefix import Pump
from trainer.launch.rank_env import STARTED_BY, Place
from trainer.launch.signals import Inbox
from trainer.stopping import INTERRUPTED, STOPPED

LISTENING = "TRAINER_LISTENING_FD"
"""Environment variable of rank 0: the descriptor of the socket where ranks meet."""

_ORDERLY = (0, STOPPED, INTERRUPTED)
_PATIENCE = 3
"""Ctrl-C so often kills: the first asks ranks to save, the second to give up."""

_LAST_WORDS = 5.0
"""Seconds for what a rank that has ended has printed."""


@dataclass(frozen=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    pump: Pump | None


class Crew:
    """The ranks of this machine: those that live, and what became of the others.

    Args:
        inbox: The signals that they are told of.
        grace: Seconds that they have to end when one of them has failed.
    """

    def __init__(self, inbox: Inbox, grace: float) -> None:
        self._inbox, self._grace = inbox, grace
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
        """Leave nobody behind, whatever went wrong."""
        while self._living and not self._given_up:
            if not self._killed or time.monotonic() >= self._kill_at:
                self._kill()
            for rank in self._next_ended():
                self._bury(rank)
        self._selector.close()

    def start(
        self, command: Sequence[str], place: Place, environ: Mapping[str, str], listener: socket.socket
    ) -> None:
        """Start one rank, in a process group of its own: Ctrl-C reaches it once, through us."""
        handed = [listener.fileno()] if place.rank == 0 else []
        pump = Pump(f"[rank {place.rank}] ") if place.rank else None
        process = subprocess.Popen(  # noqa: S603 - the caller's command
            tethered(signal.SIGKILL, command),
            env={**environ, **place.variables(), STARTED_BY: "trainer", LISTENING: str(listener.fileno())},
            pass_fds=handed,
            stdin=subprocess.DEVNULL,
            stdout=pump.entry if pump else None,
            stderr=pump.entry if pump else None,
            process_group=0,
        )
        if pump is not None:
            pump.start()
        rank = _Rank(place.rank, process, os.pidfd_open(process.pid), pump)
        self._living[place.rank] = rank
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def wait(self) -> int:
        """Stay until all have ended and return the code of them all."""
        while self._living and not self._given_up:
            ended = self._next_ended()
            for number in self._inbox.take():
                self._pass_on(number)
            self._note([(rank, self._bury(rank)) for rank in ended])
            if time.monotonic() >= self._kill_at:
                self._kill()
        return self._code

    def _next_ended(self) -> list[_Rank]:
        """Wait for a signal, the end of a rank or the time to kill; return the ranks that have ended."""
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

    def _note(self, ended: list[tuple[_Rank, int]]) -> None:
        """Take over what has become of ranks; one that was killed explains what its peers met meanwhile."""
        for rank, status in sorted(ended, key=lambda end: end[1]):
            code = self._code_of(status)
            if self._code not in _ORDERLY:
                continue
            self._code = max(self._code, code) if code in _ORDERLY else code
            if code not in _ORDERLY:
                self._end_others(rank, status)

    def _code_of(self, status: int) -> int:
        if status >= 0:
            return status
        if -status in self._passed_on:  # it had not even begun: there is nothing to save
            return INTERRUPTED if -status == signal.SIGINT else STOPPED
        return 128 - status

    def _end_others(self, rank: _Rank, status: int) -> None:
        how = f"was killed by {_name(-status)}" if status < 0 else f"ended with {status}"
        others = f"; ending the other {len(self._living)}" if self._living else ""
        _say(f"error: rank {rank.number} (pid {rank.process.pid}) {how}{others}")
        if status == -signal.SIGKILL:
            _say("hint: dmesg | tail   # the kernel kills when memory runs out")
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace

    def _send(self, number: signal.Signals) -> None:
        for rank in self._living.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, number)

    def _kill(self) -> None:
        """Kill what is left; whoever does not even end of that hangs in the kernel, and is left behind."""
        if self._killed:
            left = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in self._living.values())
            _say(f"error: {left} cannot be killed: it waits for a file system or a device")
        self._given_up, self._killed = self._killed, True
        self._send(signal.SIGKILL)
        self._kill_at = time.monotonic() + self._grace

    def _bury(self, rank: _Rank) -> int:
        """Return how a rank ended; take its leftovers with it, while its number cannot be anybody else's."""
        self._selector.unregister(rank.pidfd)
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        status = rank.process.wait()
        del self._living[rank.number]
        os.close(rank.pidfd)
        if rank.pump is not None:
            rank.pump.join(_LAST_WORDS)
        return status


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a message for people
