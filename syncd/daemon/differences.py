"""What has changed in a job between two snapshots, as messages: a pure function, so that each is reported once."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from syncd.daemon.snapshot import Module, Snapshot, lag_of
from syncd.observe import event_names
from syncd.observe.events import Level
from syncd.protocol.engine_state import EngineReport, EngineState, engine_of
from syncd.protocol.presence import recent_of
from syncd.protocol.read_bytes import ReadBytes, read_bytes_of
from syncd.protocol.step import Step, StepState

_MOST_ROWS = 400  # explorers in one event: a line of the journal is bounded

_EVENT_OF_STATE = {
    StepState.FILLING: event_names.STEP_PROGRESSED,
    StepState.COMPLETE: event_names.STEP_COMPLETED,
    StepState.DAMAGED: event_names.STEP_DAMAGED,
}


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


def _modules(kind: str, before: Mapping[str, Module], after: Mapping[str, Module]) -> Iterator[Message]:
    if before is after:
        return
    for name, module in after.items():
        earlier = before.get(name)
        if module.has_left:
            if earlier is not None and not earlier.has_left:
                yield Message(f"{kind}_left", "info", {kind: name})
        elif earlier is None or _is_another(earlier, module):
            yield Message(f"{kind}_joined", "info", {kind: name, "host": module.presence.host})
        elif not module.alive and earlier.alive:
            yield Message(f"{kind}_died", "warning", {kind: name, "silent_for": round(module.silent_for, 1)})
    for name in before.keys() - after.keys():
        if not before[name].has_left:
            yield Message(f"{kind}_left", "info", {kind: name})


def _is_another(earlier: Module, module: Module) -> bool:
    is_new_run = earlier.presence.incarnation != module.presence.incarnation
    return is_new_run or (module.alive and not earlier.alive)


def _lags(before: Snapshot, after: Snapshot) -> Iterator[Message]:
    """Yield the lag of each live explorer that has another one than before; None once it runs no version."""
    if before.explorers is after.explorers and before.version == after.version:
        return
    for name, module in after.explorers.items():
        lag = _lag(after, name)
        if _is_here(module) and lag != _lag(before, name):
            yield Message(event_names.EXPLORER_LAG_CHANGED, "debug", {"explorer": name, "lag": lag})


def _lag(snapshot: Snapshot, name: str) -> int | None:
    module = snapshot.explorers.get(name)
    return lag_of(snapshot, module) if module and _is_here(module) else None


def _is_here(module: Module) -> bool:
    return module.alive and not module.has_left


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
    if earlier is module or (earlier is None and not _is_here(module)):
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


def _moved(earlier: Module | None, module: Module) -> list[Any] | None:
    """Return name, generation, step and the engine's state of an explorer that runs something else than before."""
    if earlier is module:
        return None
    engine, presence = _engine(module), module.presence
    was = _engine(earlier)
    if not _is_here(module) or (engine and engine.state is EngineState.LOADING):
        return None
    state = engine and engine.state.value
    is_new = earlier is None or _is_another(earlier, module) or presence.applied != earlier.presence.applied
    if not is_new and state == (was and was.state.value):
        return None
    generation, step = presence.applied or (None, None)
    return [presence.identity, generation, step, state]


def _engine(module: Module | None) -> EngineReport | None:
    return engine_of(module.presence) if module and _is_here(module) else None


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
