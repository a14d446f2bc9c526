"""What is worth reporting about a job: what changed between two snapshots, and what is wrong with one.

`differences` and `symptoms` are pure, so that every message is testable and is published once. `EventReporter` hands
events to the observers.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from syncd.daemon.chains import change_figures
from syncd.daemon.snapshot import Module, Snapshot
from syncd.errors import StorageError, SyncdError, calls_of, plain
from syncd.observe import event_names
from syncd.observe.events import Event, Level, Observer
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import EngineReport, EngineState, engine_of
from syncd.protocol.entry_problem import EntryProblem
from syncd.protocol.mount import MountState, MountTrouble
from syncd.protocol.presence import RunningStatus, recent_of
from syncd.protocol.read_bytes import ReadBytes, read_bytes_of
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import BELIEVED_GENERATION, MISSING_MARKER, Version

LASTING = 1.0  # seconds that a marker must be wrong before that is worth reporting

_EVENT_OF_PROBLEM = {
    "marker": event_names.MARKER_REJECTED,
    "version": event_names.VERSION_FILE_REJECTED,
    "unreadable_presence": event_names.ENTRY_READ_FAILED,
    "unreadable_directory": event_names.ENTRY_READ_FAILED,
    "tracker": event_names.ENTRY_READ_FAILED,
    "obstacle": event_names.ENTRY_READ_FAILED,
    "document": event_names.DOCUMENT_REJECTED,
}

_EVENT_OF_STATE = {
    StepState.FILLING: event_names.STEP_PROGRESSED,
    StepState.COMPLETE: event_names.STEP_COMPLETED,
    StepState.DAMAGED: event_names.STEP_DAMAGED,
}

Problem = tuple[str, str]  # a stable name, and what is wrong


class EventReporter:
    """Publishes events to the observers.

    Args:
        observer: Hears every event; another thread empties the trash, so it takes events from any.
    """

    def __init__(self, observer: Observer, clock: Clock) -> None:
        self._observer, self._clock = observer, clock
        self._problems: set[Problem] = set()

    def publish(self, name: str, level: Level, **fields: Any) -> None:
        self._observer.observe(Event(name, level, self._clock.time(), fields))

    def publish_differences(self, before: Snapshot, after: Snapshot) -> None:
        for message in differences(before, after):
            self.publish(message.name, message.level, **message.fields)

    def publish_problems(self, problems: Iterable[Problem]) -> None:
        """Publish each problem when it begins, and not again while it lasts."""
        now = tuple(problems)
        for name, detail in now:
            if (name, detail) in self._problems:
                continue
            event = _EVENT_OF_PROBLEM.get(name, event_names.STEP_DAMAGED)
            if event == event_names.ENTRY_READ_FAILED:
                self.publish(event, "error", code=StorageError.code, detail=detail)
            else:
                self.publish(event, "warning", detail=detail)
        self._problems = set(now)

    def publish_quarantine(self, before: Version | None, after: Version | None) -> None:
        """Publish each step that has just been put aside."""
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
        """Publish the state of the file system if it has changed."""
        was = before.state if before else MountState.OK
        if now is not None and now.state is not was:
            fields = {"state": now.state, "detail": now.message, "hint": now.hint}
            self.publish(event_names.MOUNT_STATE_CHANGED, "error", **fields)
        elif now is None and was is not MountState.OK:
            self.publish(event_names.MOUNT_STATE_CHANGED, "info", state=MountState.OK, detail=f"it was {was}")


_MOST_CALLS = 12


class Message(NamedTuple):
    """An event before it is dated."""

    name: str
    level: Level
    fields: dict[str, Any]


def differences(before: Snapshot, after: Snapshot) -> Iterator[Message]:
    """Return what has changed between two looks, in an order that reads well."""
    yield from _steps(before.steps, after.steps)
    yield from _passed(before.explorers, after.explorers)
    yield from _modules("explorer", before.explorers, after.explorers)
    yield from _modules("trainer", before.trainers, after.trainers)
    yield from _lags(before, after)
    yield from _engines(before.explorers, after.explorers)
    yield from _applied(before.explorers, after.explorers)


def totals(snapshot: Snapshot) -> dict[str, Any]:
    """Return the counts that metrics show of a whole job; the living alone count."""
    return {
        "steps": len(snapshot.steps),
        "bytes": snapshot.job_size,
        "free": snapshot.free,
        "leases": len(snapshot.leases),
        "explorers": living(snapshot.explorers),
        "trainers": living(snapshot.trainers),
    }


def living(modules: Mapping[str, Module]) -> int:
    """Return how many modules neither have stopped nor died."""
    return sum(module.alive and not _has_left(module) for module in modules.values())


def _steps(before: Mapping[int, Step], after: Mapping[int, Step]) -> Iterator[Message]:
    if before is after:
        return
    for number, step in after.items():
        earlier = before.get(number)
        if earlier is step:
            continue
        if earlier is None:
            yield Message(
                event_names.STEP_FOUND, "info" if step.state is StepState.FILLING else "debug", describe(step)
            )
        was = (earlier.present, earlier.state) if earlier else (0, StepState.FILLING)
        if was != (step.present, step.state):
            level: Level = "error" if step.state is StepState.DAMAGED else "info"
            yield Message(_EVENT_OF_STATE[step.state], level, describe(step))
        if _shortcut_problem(step) != _shortcut_problem(earlier):
            yield from _shortcut(step)


def _shortcut_problem(step: Step | None) -> str:
    return step.shortcut.problem if step and step.shortcut else ""


def _shortcut(step: Step) -> Iterator[Message]:
    """Yield that nobody can use the shortcut of a step, whose own files are whole."""
    if step.shortcut and step.shortcut.problem:
        fields = {"step": step.step, "parent": step.shortcut.parent, "detail": step.shortcut.problem}
        yield Message(event_names.SHORTCUT_REJECTED, "warning", fields)


def describe(step: Step) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "step": step.step,
        "state": step.state.value,
        "present": step.present,
        "expected": step.expected,
        "bytes": step.size,
        "layout": step.layout,
    }
    if step.problem:
        fields["problem"] = step.problem
    return fields


def change_fields(snapshot: Snapshot, number: int) -> dict[str, Any]:
    """Return the log fields of a step's changes, none if it has no changes that can be used."""
    figures = change_figures(snapshot.steps, snapshot.steps[number])
    if figures is None:
        return {}
    sizes = {"changes_bytes": figures.size, "whole_bytes": figures.whole_size}
    return {"parent": figures.parent, "density": figures.density, "chain": figures.chain, **sizes}


def _modules(kind: str, before: Mapping[str, Module], after: Mapping[str, Module]) -> Iterator[Message]:
    if before is after:
        return
    for name, module in after.items():
        earlier = before.get(name)
        if _has_left(module):
            if earlier is not None and not _has_left(earlier):
                yield Message(f"{kind}_left", "info", {kind: name})
        elif earlier is None or _is_another(earlier, module):
            yield Message(f"{kind}_joined", "info", {kind: name, "host": module.presence.host})
        elif not module.alive and earlier.alive:
            yield Message(f"{kind}_died", "warning", {kind: name, "silent_for": round(module.silent_for, 1)})
    for name in before.keys() - after.keys():
        if not _has_left(before[name]):
            yield Message(f"{kind}_left", "info", {kind: name})


def _is_another(earlier: Module, module: Module) -> bool:
    """Return whether it is a new run, or beats again after it counted as dead."""
    is_new_run = earlier.presence.incarnation != module.presence.incarnation
    return is_new_run or (module.alive and not earlier.alive)


def _has_left(module: Module) -> bool:
    return module.presence.status is RunningStatus.STOPPED


def _lags(before: Snapshot, after: Snapshot) -> Iterator[Message]:
    """Yield how far each live explorer is behind whenever that changes."""
    if before.explorers is after.explorers and before.version == after.version:
        return
    for name, module in after.explorers.items():
        lag = lag_of(after, module)
        earlier = before.explorers.get(name)
        if lag is not None and module.alive and (earlier is None or lag != lag_of(before, earlier)):
            yield Message(event_names.EXPLORER_LAG_CHANGED, "debug", {"explorer": name, "lag": lag})


def _engines(before: Mapping[str, Module], after: Mapping[str, Module]) -> Iterator[Message]:
    if before is after:
        return
    for name, module in after.items():
        now, was = _engine(module), _engine(before.get(name))
        if now is None or now == was:
            continue
        read = read_bytes_of(module.presence.info)
        figures = {**_figures(now), **_read_figures(read)}
        yield Message(event_names.ENGINE_REPORTED, "debug", {"explorer": name, **figures})
        state = was.state if was else None
        if now.state is not state and (now.state.is_trouble or (state and state.is_trouble)):
            fields = {"explorer": name, "state": now.state.value, "before": state and state.value}
            yield Message(
                event_names.ENGINE_STATE_CHANGED, _level(now.state), {**fields, "reason": now.reason}
            )


def _passed(before: Mapping[str, Module], after: Mapping[str, Module]) -> Iterator[Message]:
    """Yield the versions that explorers have run since they were last read, of which some may be over already."""
    if before is after:
        return
    rows = [row for name, module in after.items() for row in _recent(before.get(name), module)]
    for start in range(0, len(rows), _MOST_ROWS):
        fields = {"explorers": [], "recent": rows[start : start + _MOST_ROWS]}
        yield Message(event_names.VERSIONS_APPLIED, "debug", fields)


def _recent(earlier: Module | None, module: Module) -> Iterator[list[Any]]:
    """Yield name, generation, step and state of versions that are new in a presence, and how long ago they came.

    Seconds are between two times of the explorer's own clock: that of the version, and that of the presence.
    """
    presence = module.presence
    if earlier is module or (earlier is None and (_has_left(module) or not module.alive)):
        return
    same_run = earlier is not None and earlier.presence.incarnation == presence.incarnation
    reported = recent_of(earlier.presence) if earlier is not None and same_run else []
    for version in recent_of(presence):
        if version not in reported:
            ago = round(max(presence.updated_at - version.at, 0.0), 3)
            yield [presence.identity, version.generation, version.step, version.state, ago]


def _applied(before: Mapping[str, Module], after: Mapping[str, Module]) -> Iterator[Message]:
    """Yield what live explorers run, of all in one event, whenever that changes; a load that goes on is no change."""
    if before is after:
        return
    rows = [row for name, module in after.items() if (row := _moved(before.get(name), module)) is not None]
    for start in range(0, len(rows), _MOST_ROWS):
        yield Message(event_names.VERSIONS_APPLIED, "debug", {"explorers": rows[start : start + _MOST_ROWS]})


_MOST_ROWS = 400  # explorers in one event: a line of the journal is bounded


def _moved(earlier: Module | None, module: Module) -> list[Any] | None:
    """Return name, generation, step and the engine's state of an explorer that runs something else than before."""
    if earlier is module:
        return None
    engine, presence = _engine(module), module.presence
    was = _engine(earlier)
    if not module.alive or _has_left(module) or (engine and engine.state is EngineState.LOADING):
        return None
    state = engine and engine.state.value
    is_new = earlier is None or _is_another(earlier, module) or presence.applied != earlier.presence.applied
    if not is_new and state == (was and was.state.value):
        return None
    generation, step = presence.applied or (None, None)
    return [presence.identity, generation, step, state]


def _engine(module: Module | None) -> EngineReport | None:
    return engine_of(module.presence) if module and module.alive and not _has_left(module) else None


def _figures(engine: EngineReport) -> dict[str, Any]:
    proof = engine.proof
    return {
        "state": engine.state.value,
        "ready": engine.ready,
        "failures": engine.failures,
        "load_seconds": engine.load_seconds,
        "mean": proof and proof.mean,
        "tolerance": proof and proof.tolerance,
    }


def _read_figures(read: ReadBytes | None) -> dict[str, Any]:
    if read is None:
        return {}
    return {"origin_bytes": read.origin, "peer_bytes": read.peers, "over_budget": read.over_budget}


def _level(state: EngineState) -> Level:
    if state in (EngineState.WRONG, EngineState.DEAD):
        return "error"
    return "warning" if state.is_trouble else "info"


def lag_of(snapshot: Snapshot, module: Module) -> int | None:
    """Return how many steps an explorer is behind the version, None while it has loaded nothing."""
    if snapshot.version is None or module.presence.applied is None:
        return None
    generation, step = module.presence.applied
    behind = snapshot.version.step - step
    return max(behind, 0) if generation == snapshot.version.generation else max(behind, 1)


def symptoms(snapshot: Snapshot) -> Iterator[Problem]:
    """Yield what is wrong with the marker and with what is published."""
    marker, version = snapshot.marker, snapshot.version
    # A marker that is written in place is empty or torn for a moment at each step: that is no problem.
    lasting = snapshot.marker_stable_for >= LASTING
    if (
        lasting
        and marker.problem
        and (marker.problem != MISSING_MARKER.problem or _should_have_marker(snapshot))
    ):
        yield "marker", f"{marker.problem}: {marker.text!r}" if marker.text else marker.problem
    elif lasting and marker.step is not None and _is_missing(snapshot, marker.step):
        yield "marker", f"ahead of its step: {marker.step} is not complete"
    for module in snapshot.unreadable:
        yield (
            "unreadable_presence",
            f"no step is removed while its process lives, because it may read any: {module}",
        )
    for problem in snapshot.unlisted:
        yield "unreadable_directory", f"no step is removed, because any may be leased or pinned: {problem}"
    if snapshot.tracker_problem:
        yield "tracker", f"no full checkpoint is removed, because it may name any: {snapshot.tracker_problem}"
    for problem in snapshot.entry_problems:
        yield "obstacle", problem
    # A step's own directory is shown as damaged.
    attempts = (step for step in (*snapshot.steps.values(), *snapshot.rivals) if step.is_attempt)
    yield from (("obstacle", attempt.problem) for attempt in attempts if attempt.unreadable)
    if snapshot.version_problem:
        yield "version", snapshot.version_problem
    if version and version.kind != "remote" and _is_missing(snapshot, version.step):
        yield "published_step", f"step {version.step} is published and no longer complete"
    yield from _over_budget(snapshot)
    yield from _documents(snapshot)


def _over_budget(snapshot: Snapshot) -> Iterator[Problem]:
    """Yield the explorers whose other hosts were lost, slow or wrong, so that they read their bytes as well."""
    for name, module in snapshot.explorers.items():
        read = read_bytes_of(module.presence.info)
        if module.alive and not _has_left(module) and read is not None and read.over_budget:
            yield (
                "origin_budget",
                f"explorer {name} read more of the last version from the file system than its share",
            )


def _documents(snapshot: Snapshot) -> Iterator[Problem]:
    """Yield the documents that are ignored, wholly or in part."""
    for path, problem in {**snapshot.unreadable_pins, **snapshot.unreadable_requests}.items():
        yield "document", f"{plain(path)}: {problem}"
    for name, module in snapshot.explorers.items():
        applied = module.presence.applied
        if applied is not None and applied[0] > BELIEVED_GENERATION:
            yield "document", f"explorer {name} names generation {applied[0]}, which is too high to be real"


def _should_have_marker(snapshot: Snapshot) -> bool:
    """Return whether there are steps that a marker announces; for verl's own the tracker serves too.

    One that is being written is announced later: the first step of a job has no marker before it.
    """
    if any(step.is_native and step.state is not StepState.FILLING for step in snapshot.steps.values()):
        return True
    return snapshot.tracker is None and any(step.announced_by == "marker" for step in snapshot.steps.values())


def _is_missing(snapshot: Snapshot, number: int) -> bool:
    step = snapshot.steps.get(number)
    return step is None or step.state is not StepState.COMPLETE
