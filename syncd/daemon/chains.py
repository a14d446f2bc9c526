"""Chains of steps that are stored as changes: what a step needs, and by which changes explorers catch up.

Pure functions of what a scan found. docs/delta.md describes deltas and shortcuts.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.step import Step, StepState

Steps = Mapping[int, Step]


class ChangeFigures(NamedTuple):
    """The figures of a step's changes: of a delta, or of the shortcut of a step that is stored whole.

    Args:
        parent: The step that they change.
        density: The share of words that changed, None if the step has no words.
        size: Bytes of what a reader that has the parent reads.
        whole_size: Bytes of the files that it then has.
        chain: Deltas from the keyframe to this step, itself included; None where a link is missing or damaged.
    """

    parent: int | None
    density: float | None
    size: int
    whole_size: int
    chain: int | None


def change_figures(steps: Steps, step: Step) -> ChangeFigures | None:
    """Return the figures of the changes of a complete step, None if it has none that can be used."""
    if step.state is not StepState.COMPLETE:
        return None
    if step.kind == "delta":
        return ChangeFigures(step.parent, step.density, step.size, step.whole_size, chain_length(steps, step))
    found = step.shortcut
    if found is None or found.problem:
        return None
    return ChangeFigures(found.parent, found.density, found.size, step.whole_size, 0)


def chain_length(steps: Steps, step: Step) -> int | None:
    """Return how many deltas lead from a keyframe to a step, None where a link is missing or damaged."""
    link: Step | None = step
    count = 0
    while link is not None and link.kind == "delta" and link.state is StepState.COMPLETE:
        link = steps.get(-1 if link.parent is None else link.parent)
        count += 1
    is_whole = link is not None and link.kind == "weights" and link.state is StepState.COMPLETE
    return count if is_whole else None


def links(step: int, steps: Steps) -> Iterator[int]:
    """Yield what a delta or an adapter needs, also of a broken chain: a person may still repair what is left."""
    while (found := steps.get(step)) is not None and found.parent is not None and found.parent < step:
        yield found.parent
        step = found.parent


def is_obscure(step: Step) -> bool:
    """Return whether a step is there and its manifest could not be read, so what it is stored as is not known."""
    return step.is_native and step.state is StepState.DAMAGED and not step.digest


def may_have_deltas(snapshot: Snapshot) -> bool:
    """Return whether a step of the job may be a delta: one is, one has a shortcut, or an explorer reads them."""
    version, steps = snapshot.version, snapshot.steps.values()
    return (
        (version is not None and version.kind == "delta")
        or any(step.kind == "delta" or step.shortcut is not None for step in steps)
        or any(READS_DELTA in module.presence.reads for module in snapshot.explorers.values())
    )


def catching_up(snapshot: Snapshot) -> dict[int, str]:
    """Return the steps that explorers need to reach the published one by changes alone, each with why it is needed.

    An explorer counts if it lives, reads deltas, and would read fewer bytes of changes than a whole step has.
    """
    needed: dict[int, str] = {}
    for name, module in sorted(snapshot.explorers.items()):
        path, size = _changes_since(module, snapshot)
        for step in path:
            text = f"explorer {name} reaches step {path[0]} by {size} bytes of changes"
            needed.setdefault(step, text)
    return needed


def _changes_since(module: Module, snapshot: Snapshot) -> tuple[list[int], int]:
    """Return the steps whose changes lead an explorer to the published one, newest first, and their bytes."""
    version, presence = snapshot.version, module.presence
    if version is None or not module.alive or presence.applied is None or READS_DELTA not in presence.reads:
        return [], 0
    base, step, path, size = presence.applied[1], snapshot.steps.get(version.step), list[int](), 0
    if step is None or not _runs(snapshot.steps.get(base), presence.applied_digest):
        return [], 0
    whole = step.whole_size
    while step is not None and step.step > base:
        figures = change_figures(snapshot.steps, step)
        if figures is None or figures.parent is None or (size := size + figures.size) >= whole:
            return [], 0
        path.append(step.step)
        if figures.parent == base:
            return path, size
        step = snapshot.steps.get(figures.parent)
    return [], 0


def _runs(step: Step | None, digest: str) -> bool:
    """Return whether an explorer that reports a digest may run the step that has this number now."""
    return step is None or not digest or step.digest == digest
