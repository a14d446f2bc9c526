"""Which process one is, by what no later one shares: so that a dead leader of this host is known at once."""

import os
from dataclasses import dataclass

_ENDED, _UNSEEN = -1, -2


def host_name() -> str:
    """Return this host's name, as `socket.gethostname` does: which takes longer to import than what it is for."""
    return os.uname().nodename


@dataclass(frozen=True, slots=True)
class Process:
    """A process by what no later one shares: host boot, namespace, pid and start time."""

    boot: str
    namespace: str
    pid: int
    started: int

    @staticmethod
    def current() -> "Process":
        return Process(_boot(), _namespace(), os.getpid(), _started(os.getpid()))

    def is_gone(self) -> bool:
        """Return whether the process has certainly ended: it ran on this boot of this host, and is not there."""
        if (self.boot, self.namespace) != (_boot(), _namespace()) or not self.boot:
            return False
        started = _started(self.pid)
        return started != self.started and (started != _UNSEEN or not _exists(self.pid))

    def is_here(self) -> bool:
        """Return whether it is a process of this host that has not ended; it may be stopped."""
        return (
            bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace()) and not self.is_gone()
        )


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    """Return whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _started(pid: int) -> int:
    """Return when a process started, in ticks since boot; `_ENDED` for a zombie, `_UNSEEN` if it is not shown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
    except OSError:
        return _UNSEEN
    return _ENDED if after_name[0] in ("Z", "X") else int(after_name[19])
