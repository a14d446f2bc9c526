"""What is worth telling about two looks at a job: pure, so that every message is testable and said once."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from syncd.daemon.snapshot import Module, Snapshot
from syncd.observe import names
from syncd.observe.events import Level
from syncd.protocol.presence import RunningStatus
from syncd.protocol.step import Step, StepState


class Message(NamedTuple):
    """An event before it is dated."""

    name: str
    level: Level
    fields: dict[str, Any]


def differences(before: Snapshot, after: Snapshot) -> Iterator[Message]:
    """Return what has changed between two looks, in an order that reads well."""
    yield from _steps(before.steps, after.steps)
    yield from _modules("explorer", before.explorers, after.explorers)
    yield from _modules("trainer", before.trainers, after.trainers)
    yield from _lags(before, after)


def totals(snapshot: Snapshot) -> dict[str, Any]:
    """Return the counts that metrics show of a whole job; the living alone count."""
    return {
        "steps": len(snapshot.steps),
        "bytes": snapshot.job_size,
        "free": snapshot.free,
        "leases": len(snapshot.leases),
        "explorers": _living(snapshot.explorers),
        "trainers": _living(snapshot.trainers),
    }


def _living(modules: Mapping[str, Module]) -> int:
    return sum(module.alive and not _has_left(module) for module in modules.values())


def _steps(before: Mapping[int, Step], after: Mapping[int, Step]) -> Iterator[Message]:
    if before is after:
        return
    for number, step in after.items():
        known = before.get(number)
        if known is step:
            continue
        if known is None:
            yield Message(
                names.STEP_FOUND, "info" if step.state is StepState.FILLING else "debug", describe(step)
            )
        was = (known.present, known.state) if known else (0, StepState.FILLING)
        if was != (step.present, step.state):
            yield from _state(step)


def _state(step: Step) -> Iterator[Message]:
    if step.state is StepState.DAMAGED:
        yield Message(names.STEP_DAMAGED, "error", describe(step))
    elif step.state is StepState.COMPLETE:
        yield Message(names.STEP_COMPLETED, "info", describe(step))
    else:
        yield Message(names.STEP_PROGRESSED, "info", describe(step))


def describe(step: Step) -> dict[str, Any]:
    """Return the log fields of a step."""
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
        known = before.get(name)
        if known is None or _is_another(known, module):
            yield Message(f"{kind}_joined", "info", {kind: name, "host": module.presence.host})
        elif _has_left(module) and not _has_left(known):
            yield Message(f"{kind}_left", "info", {kind: name})
        elif not module.alive and known.alive and not _has_left(module):
            yield Message(f"{kind}_died", "warning", {kind: name, "silent_for": round(module.silent_for, 1)})
    for name in before.keys() - after.keys():
        if not _has_left(before[name]):
            yield Message(f"{kind}_left", "info", {kind: name})


def _is_another(known: Module, module: Module) -> bool:
    """Say whether it runs anew, or beats again after it was taken for dead."""
    runs_anew = known.presence.incarnation != module.presence.incarnation
    return runs_anew or (module.alive and not known.alive)


def _has_left(module: Module) -> bool:
    return module.presence.status is RunningStatus.STOPPED


def _lags(before: Snapshot, after: Snapshot) -> Iterator[Message]:
    """Say how far each live explorer is behind whenever that changes."""
    if before.explorers is after.explorers and before.version == after.version:
        return
    for name, module in after.explorers.items():
        lag = lag_of(after, module)
        known = before.explorers.get(name)
        if lag is not None and module.alive and (known is None or lag != lag_of(before, known)):
            yield Message(names.EXPLORER_LAG_CHANGED, "debug", {"explorer": name, "lag": lag})


def lag_of(snapshot: Snapshot, module: Module) -> int | None:
    """Return how many steps an explorer is behind the version, None while it has loaded nothing."""
    if snapshot.version is None or module.presence.applied is None:
        return None
    generation, step = module.presence.applied
    behind = snapshot.version.step - step
    return max(behind, 0) if generation == snapshot.version.generation else max(behind, 1)
