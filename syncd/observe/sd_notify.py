"""Notifies systemd as a `Type=notify-reload` service; does nothing without NOTIFY_SOCKET."""

import os
import socket
import threading
import time
from collections.abc import Mapping

_STATUS_LIMIT = 500


def watchdog_interval(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds within which systemd wants a sign of life, None when it wants none from here."""
    text, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID")
    if not text.isdecimal() or int(text) == 0 or process not in (None, "", str(os.getpid())):
        return None
    return int(text) / 1e6


class Notifier:
    """Notifies the service manager; a manager that does not listen is no reason to fail.

    Signs of life are sent four times an interval at most, a status only when it changes.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog = watchdog_interval(environment) if self._address else None
        self._alive_at = float("-inf")
        self._status = ""
        self._one_at_a_time = threading.Lock()  # never held but to send, which never waits

    def ready(self, status: str) -> None:
        """Report that the daemon has started, or has read its configuration again."""
        with self._one_at_a_time:
            self._status = _line(status)
            self._send("READY=1", f"STATUS={self._status}")

    def alive(self, status: str) -> None:
        """Report that a tick was finished, or that what it waits for is known and reported."""
        self.status(status)
        now = time.monotonic()
        with self._one_at_a_time:
            if self._watchdog is not None and now - self._alive_at >= self._watchdog / 4:
                self._alive_at = now
                self._send("WATCHDOG=1")

    def status(self, status: str) -> None:
        """Report the status, without a sign of life."""
        with self._one_at_a_time:
            if (line := _line(status)) != self._status:
                self._status = line
                self._send(f"STATUS={line}")

    def reloading(self) -> None:
        """Report that the configuration is being read again; `ready` ends it."""
        # systemd compares this with its own CLOCK_MONOTONIC to tell this reload from an earlier one.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                # A manager that does not read must not hold a tick up.
                sender.setblocking(False)  # noqa: FBT003 - the socket's own signature
                sender.sendto("\n".join(lines).encode(errors="backslashreplace"), self._address)
        except OSError:
            return


def _address(path: str) -> str | None:
    """Return the socket's address; a leading @ stands for the abstract namespace."""
    if path.startswith("@"):
        return f"\0{path[1:]}"
    return path if path.startswith("/") else None


def _line(status: str) -> str:
    return " ".join(status.split())[:_STATUS_LIMIT]
