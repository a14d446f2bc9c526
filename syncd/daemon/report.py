"""Hands events to the observers: what changed between two snapshots, what is wrong, and what failed."""

from collections.abc import Iterable
from typing import Any

from syncd.daemon.chains import change_figures
from syncd.daemon.differences import differences
from syncd.daemon.snapshot import Snapshot, living
from syncd.daemon.symptoms import Problem
from syncd.errors import StorageError, SyncdError, calls_of
from syncd.observe import event_names
from syncd.observe.events import Event, Level, Observer
from syncd.protocol.disk import Clock
from syncd.protocol.entry_problem import EntryProblem
from syncd.protocol.mount import MountState, MountTrouble
from syncd.protocol.step import StepState
from syncd.protocol.version import Version

_MOST_CALLS = 12

_EVENT_OF_PROBLEM = {
    "marker": event_names.MARKER_REJECTED,
    "version": event_names.VERSION_FILE_REJECTED,
    "published_step": event_names.STEP_DAMAGED,
    "unreadable_presence": event_names.ENTRY_READ_FAILED,
    "unreadable_directory": event_names.ENTRY_READ_FAILED,
    "tracker": event_names.ENTRY_READ_FAILED,
    "obstacle": event_names.ENTRY_READ_FAILED,
    "document": event_names.DOCUMENT_REJECTED,
}


class EventReporter:
    """Publishes events to `observer`, which takes them from any thread: another one empties the trash."""

    def __init__(self, observer: Observer, clock: Clock) -> None:
        self._observer, self._clock = observer, clock
        self._problems: set[Problem] = set()
        self._reported = Snapshot()

    def begin_term(self) -> None:
        """Forget what was reported: a daemon that begins to lead reports all that is there."""
        self._reported = Snapshot()

    def publish(self, name: str, level: Level, **fields: Any) -> None:
        self._observer.observe(Event(name, level, self._clock.time(), fields))

    def publish_differences(self, snapshot: Snapshot) -> None:
        """Publish what has changed since the snapshot of the last call; a tick that failed made none."""
        before, self._reported = self._reported, snapshot
        for message in differences(before, snapshot):
            self.publish(message.name, message.level, **message.fields)

    def publish_problems(self, problems: Iterable[Problem]) -> None:
        """Publish each problem when it begins, and not again while it lasts."""
        now = tuple(problems)
        for name, detail in now:
            if (name, detail) in self._problems:
                continue
            event = _EVENT_OF_PROBLEM[name]
            if event == event_names.ENTRY_READ_FAILED:
                self.publish(event, "error", code=StorageError.code, detail=detail)
            else:
                self.publish(event, "warning", detail=detail)
        self._problems = set(now)

    def publish_quarantine(self, before: Version | None, after: Version | None) -> None:
        reported = before.quarantined if before else frozenset()
        for entry in after.quarantine if after else ():
            if (entry.step, entry.digest) not in reported:
                self.publish(event_names.STEP_QUARANTINED, "error", **entry._asdict())

    def publish_failure(
        self, error: SyncdError, hint: str | None = None, name: str = event_names.OPERATION_FAILED
    ) -> None:
        """Publish what failed and is tried again; of a bug also the calls that led to it, the innermost last."""
        fields = {"code": error.code, "detail": str(error), "hint": hint or error.hint}
        if error.code == SyncdError.code:
            fields["calls"] = " > ".join(calls_of(error.__cause__)[-_MOST_CALLS:])
        self.publish(name, "error", **fields)

    def publish_entry_problem(self, entry_problem: EntryProblem) -> None:
        self.publish(
            event_names.ENTRY_MOVE_FAILED,
            "error",
            code=StorageError.code,
            path=entry_problem.path,
            detail=f"it cannot be moved or removed: {entry_problem.message}",
            owner=entry_problem.owner,
            hint=entry_problem.hint,
        )

    def publish_mount(self, before: MountTrouble | None, now: MountTrouble | None) -> None:
        was = before.state if before else MountState.OK
        if now is not None and now.state is not was:
            fields = {"state": now.state, "detail": now.message, "hint": now.hint}
            self.publish(event_names.MOUNT_STATE_CHANGED, "error", **fields)
        elif now is None and was is not MountState.OK:
            self.publish(event_names.MOUNT_STATE_CHANGED, "info", state=MountState.OK, detail=f"it was {was}")


def totals(snapshot: Snapshot) -> dict[str, Any]:
    """Return what metrics show of a whole job: counts, of which the living alone are, and the steps being written."""
    return {
        "steps": len(snapshot.steps),
        "filling": [step.step for step in snapshot.steps.values() if step.state is StepState.FILLING],
        "bytes": snapshot.job_size,
        "free": snapshot.free,
        "leases": len(snapshot.leases),
        "explorers": living(snapshot.explorers),
        "trainers": living(snapshot.trainers),
    }


def change_fields(snapshot: Snapshot, number: int) -> dict[str, Any]:
    figures = change_figures(snapshot.steps, snapshot.steps[number])
    if figures is None:
        return {}
    sizes = {"changes_bytes": figures.size, "whole_bytes": figures.whole_size}
    return {"parent": figures.parent, "density": figures.density, "chain": figures.chain, **sizes}
