"""The watchdog: the main thread reports while another thread works, above all an operation that does not return.

It does no I/O on the job's file system, so no mount can keep it from reporting, or from ending the process.
"""

import threading
from collections.abc import Mapping
from typing import Any

from syncd.daemon.service import Daemon
from syncd.daemon.snapshot import living
from syncd.errors import StuckError
from syncd.observe import event_names
from syncd.observe.events import Event, Observer
from syncd.protocol.disk import Clock
from syncd.protocol.mount import MountState, MountTrouble, mount_trouble
from syncd.protocol.process import host_name
from syncd.protocol.version import pair_document
from syncd.stall import host_state
from syncd.stall.calls import MOUNT_HINT, STUCK_AFTER, PendingCalls, StuckCall

Document = dict[str, Any]

WRITE_EVERY = 5.0
"""Seconds after which the host's file is written again although nothing has changed."""

STOP_GRACE = 2.0
"""Seconds that a stuck operation is given to return once the daemon is asked to stop."""

_EVERY = 1.0


class Watchdog:
    """Watches a daemon that works in another thread.

    Args:
        in_hand: What the daemon asks of the file system.
        aside: Hears what the main thread reports; it must write nothing to the job's mount.
        interval: Seconds within which the service manager wants a sign of life, None when it wants none.
    """

    def __init__(
        self,
        clock: Clock,
        in_hand: PendingCalls,
        aside: Observer,
        keeper: host_state.Writer,
        interval: float | None = None,
    ) -> None:
        self.in_hand = in_hand
        self._clock, self._aside, self._keeper = clock, aside, keeper
        # The manager must hear of it before it counts the silence as a fault.
        self.limit = STUCK_AFTER if interval is None else min(STUCK_AFTER, interval / 3)
        self.every = min(_EVERY, self.limit / 2)
        self._lock = threading.Lock()
        self._stuck: StuckCall | None = None
        self._past: StuckCall | None = None
        self._state, self._since = MountState.OK, clock.time()
        self._document: Document = {}
        self._written_at = float("-inf")

    def check(self, daemon: Daemon, status: str) -> StuckCall | None:
        stuck = self._find()
        if stuck is not None:
            fields = {"seconds": round(stuck.seconds, 1), "detail": str(stuck.call), "job": daemon.job.root}
            self._publish(event_names.MOUNT_STUCK, "debug", fields)
        self._write(daemon, status, stuck)
        return stuck

    def pop_past(self) -> StuckCall | None:
        """Return what was stuck and has returned, once."""
        with self._lock:
            past, self._past = self._past, None
            return past

    def check_stop(self, thread: int | None, asked: float) -> None:
        """End a daemon told to stop at `asked`, on this host's clock, if what it waits for does not return."""
        call = self.in_hand.oldest(thread)
        if call is None or self._clock.monotonic() - asked < STOP_GRACE:
            return
        seconds = self.in_hand.age(call)
        if seconds >= self.limit:
            raise StuckError(
                f"stopped while an operation has not returned for {seconds:.0f} s ({call.what}); "
                "the lead was not released",
                path=call.path,
                hint=MOUNT_HINT,
            )

    def close(self) -> None:
        """Remove the host's file: the daemon has ended in good order."""
        self._keeper.remove()

    def _find(self) -> StuckCall | None:
        stuck = self.in_hand.stuck(self.limit)
        with self._lock:
            if self._stuck is not None and (stuck is None or stuck.call != self._stuck.call):
                self._past = self._stuck
            before, self._stuck = self._stuck, stuck
        if stuck is not None and before is None:
            self._publish(event_names.MOUNT_STATE_CHANGED, "error", stuck.fields())
        return stuck

    def _publish(self, name: str, level: Any, fields: Mapping[str, Any]) -> None:
        self._aside.observe(Event(name, level, self._clock.time(), fields))

    def _write(self, daemon: Daemon, status: str, stuck: StuckCall | None) -> None:
        now, trouble = self._clock.monotonic(), _trouble(daemon, stuck)
        state = trouble.state if trouble else MountState.OK
        if state is not self._state:
            self._state, self._since = state, self._clock.time() - (stuck.seconds if stuck else 0.0)
        document = describe(daemon, status, trouble, self._since)
        if document != self._document or now - self._written_at >= WRITE_EVERY:
            self._document, self._written_at = document, now
            self._keeper.write(self._clock.time(), document)


def _trouble(daemon: Daemon, stuck: StuckCall | None) -> MountTrouble | None:
    if stuck is None:
        return daemon.trouble
    return mount_trouble(MountState.STUCK, daemon.job.root, f"{stuck.call}, not returned")


def describe(daemon: Daemon, status: str, trouble: MountTrouble | None, since: float) -> Document:
    """Return what others on this host may know of a daemon.

    Args:
        since: Since when `trouble`, or nothing, is wrong: seconds since the epoch.
    """
    snapshot = daemon.snapshot
    version = snapshot.version
    return {
        "job": daemon.job.root,
        "state_dir": daemon.job.state,
        "host": host_name(),
        "leads": daemon.leads,
        "status": status,
        "mount": {
            "state": trouble.state if trouble else MountState.OK,
            "since": since,
            "detail": trouble.message if trouble else "",
            "hint": trouble.hint if trouble else "",
        },
        "version": None
        if version is None
        else {**(pair_document(version.pair) or {}), "published_at": version.published_at},
        "marker": snapshot.marker.step,
        "explorers": living(snapshot.explorers),
        "lag": daemon.lag,
        "free": snapshot.free,
    }
