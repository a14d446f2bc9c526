"""Parts of the daemon: what other packages do in each of its ticks, under its term."""

import errno
from typing import TYPE_CHECKING, Any, Protocol

from syncd.errors import StorageError
from syncd.registered import DAEMON_PARTS, registered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncd.config import DaemonConfig
    from syncd.daemon.leader import DaemonLeader
    from syncd.daemon.report import EventReporter
    from syncd.daemon.snapshot import Snapshot
    from syncd.protocol.disk import Clock
    from syncd.protocol.layout import Job


class DaemonPart(Protocol):
    """One part of the daemon of a job: what `open` of a registered object returns."""

    @property
    def every(self) -> float:
        """Return the seconds after which it wants to read presences again; infinity if it waits for nothing."""

    def begin_term(self) -> None:
        """Forget what it knows: this daemon has begun to lead."""

    def act(self, snapshot: "Snapshot", options: Any) -> "Snapshot":
        """Do its work in a tick, before the plan and again after a publish; return what the plan shall know.

        Args:
            options: What its table says, None without one.
        """


class DaemonParts:
    def __init__(self, job: "Job", clock: "Clock", leader: "DaemonLeader", reporter: "EventReporter") -> None:
        kinds = registered(DAEMON_PARTS).items()
        self._parts: Mapping[str, DaemonPart] = {
            name: kind.load().open(job, clock, leader, reporter) for name, kind in kinds
        }
        self._unwritten: StorageError | OSError | None = None

    @property
    def every(self) -> float:
        return min((part.every for part in self._parts.values()), default=float("inf"))

    def begin_term(self) -> None:
        for part in self._parts.values():
            part.begin_term()

    def act(self, snapshot: "Snapshot", config: "DaemonConfig") -> "Snapshot":
        """Let each part act. On a full disk a part cannot write, but the daemon must still make room."""
        for name, part in self._parts.items():
            try:
                snapshot = part.act(snapshot, config.parts.get(name))
            except (StorageError, OSError) as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._unwritten = error
        return snapshot

    def require_written(self) -> None:
        """Raise what kept a part from writing since the last call."""
        error, self._unwritten = self._unwritten, None
        if error is not None:
            raise error
