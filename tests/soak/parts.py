"""The processes of a soak, each started again once it has ended, as a service manager does."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HONEST = frozenset({0, 74, 75})
"""Ends that a service manager answers with a new start: told to, storage in trouble, later."""

RESTART_AFTER = 1.0
_STARTING = 10.0


@dataclass
class Part:
    """One part.

    Args:
        name: Its name.
        command: What is run; asked anew for each start.
        log: Where its output goes.
        environment: Of the process.
    """

    name: str
    command: Callable[[], Sequence[str]]
    log: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = True
    sent: set[int] = field(default_factory=set)
    starts: int = 0
    ends: list[str] = field(default_factory=list)
    _started: float = 0.0
    _ended: float | None = None

    @property
    def pid(self) -> int | None:
        """Return its process, None while it has none."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self.starts, self.sent, self._ended = self.starts + 1, set(), None
        self._started = time.monotonic()

    def send(self, number: int) -> bool:
        """Send a signal; say whether there was somebody."""
        if self.pid is None:
            return False
        self.sent.add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def tend(self) -> None:
        """Start it again some time after it has ended, and take down an end that nobody asked for."""
        if self.process is None or self.process.poll() is None or not self.wanted:
            return
        now = time.monotonic()
        if self._ended is None:
            self._ended = now
            self._judge(self.process.returncode)
        elif now - self._ended >= RESTART_AFTER:
            self.start()

    def end(self, patience: float) -> None:
        """Stop it for good, as a service manager does."""
        self.wanted = False
        if self.process is None:
            return
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        try:
            self._judge(self.process.wait(patience))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.ends.append(f"{self.name} was told to stop and had not after {patience:g} s")

    def _judge(self, code: int) -> None:
        # While Python starts, nobody has taken SIGTERM over yet.
        early = code == -signal.SIGTERM and time.monotonic() - self._started < _STARTING
        if not (code in HONEST or (-code in self.sent and (early or code == -signal.SIGKILL))):
            self.ends.append(f"{self.name} ended with {code}; see its log")
            self.wanted = False
