"""Chains of steps that are stored as changes: what a step needs, and by which changes explorers catch up.

Pure functions of what a scan found. docs/delta-format.md describes deltas and shortcuts.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.step import Step, StepState

Steps = Mapping[int, Step]


class ChangeFigures(NamedTuple):
    """The figures of a step's changes: of a delta, or of the shortcut of a step that is stored whole."""

    parent: int | None  # the step that they change
    density: float | None  # the share of words that changed, None if the step has no words
    size: int  # bytes of what a reader that has the parent reads
    whole_size: int  # bytes of the files that it then has
    # Deltas from the keyframe to this step, itself included; None where a link is missing or damaged.
    chain: int | None


Lengths = dict[int, int | None]  # chain lengths that were counted already, by step


def change_figures(steps: Steps, step: Step, counted: Lengths | None = None) -> ChangeFigures | None:
    """Return the figures of the changes of a complete step, None if it has none that can be used."""
    if step.state is not StepState.COMPLETE:
        return None
    if step.kind == "delta":
        chain = chain_length(steps, step, counted)
        return ChangeFigures(step.parent, step.density, step.size, step.whole_size, chain)
    shortcut = step.shortcut
    if shortcut is None or shortcut.problem:
        return None
    return ChangeFigures(shortcut.parent, shortcut.density, shortcut.size, step.whole_size, 0)


def chain_length(steps: Steps, step: Step, counted: Lengths | None = None) -> int | None:
    """Return how many deltas lead from a keyframe to a step, None where a link is missing or damaged.

    `counted` takes what is counted now, so that all steps together cost one pass.
    """
    counted = {} if counted is None else counted
    link: Step | None = step
    deltas = list[int]()
    while link is not None and link.step not in counted and link.kind == "delta":
        if link.state is not StepState.COMPLETE:
            break
        deltas.append(link.step)
        link = steps.get(-1 if link.parent is None else link.parent)
    length = None
    if link is not None and link.step in counted:
        length = counted[link.step]
    elif link is not None and link.kind == "weights" and link.state is StepState.COMPLETE:
        length = 0
    for number in reversed(deltas):
        length = counted[number] = None if length is None else length + 1
    return length


def links(step: int, steps: Steps) -> Iterator[int]:
    """Yield what a delta or an adapter needs, also of a broken chain: a person may still repair what is left."""
    while (changed := steps.get(step)) is not None and changed.parent is not None and changed.parent < step:
        yield changed.parent
        step = changed.parent


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

    An explorer counts if it lives, reads deltas, and would read fewer bytes of changes than a whole step has. The way
    back from the published step is the same for all of them: it is walked once.
    """
    way = _way_back(snapshot)
    positions: dict[int | None, int] = {base: position for position, (_, base, _) in enumerate(way)}
    needed: dict[int, str] = {}
    for name, module in sorted(snapshot.explorers.items()):
        position = positions.get(_base(module, snapshot))
        if position is None or len(needed) > position:
            continue
        text = f"explorer {name} reaches step {way[0][0]} by {way[position][2]} bytes of changes"
        needed.update({step: text for step, _, _ in way[len(needed) : position + 1]})
    return needed


def _way_back(snapshot: Snapshot) -> list[tuple[int, int, int]]:
    """Return the steps whose changes lead to the published one, newest first, as far as they are below a whole step.

    Tuples of the step, what its changes begin with, and the bytes of all changes from there to the published one.
    """
    version = snapshot.version
    step = snapshot.steps.get(version.step) if version else None
    whole, size, way = step.whole_size if step else 0, 0, list[tuple[int, int, int]]()
    while step is not None and (changes := _parent_and_size(step)) is not None:
        parent, size = changes[0], size + changes[1]
        if size >= whole or parent >= step.step:
            break
        way.append((step.step, parent, size))
        step = snapshot.steps.get(parent)
    return way


def _parent_and_size(step: Step) -> tuple[int, int] | None:
    figures = change_figures({}, step)
    return None if figures is None or figures.parent is None else (figures.parent, figures.size)


def _base(module: Module, snapshot: Snapshot) -> int | None:
    """Return the step that an explorer could apply changes to, None if there is none."""
    presence = module.presence
    if not module.alive or presence.applied is None or READS_DELTA not in presence.reads:
        return None
    base = presence.applied[1]
    return base if _runs(snapshot.steps.get(base), presence.applied_digest) else None


def _runs(step: Step | None, digest: str) -> bool:
    """Return whether an explorer that reports a digest may run the step that has this number now."""
    return step is None or not digest or step.digest == digest
