"""What is wrong with a job's marker and with what is published, from one snapshot."""

from collections.abc import Iterator

from syncd.daemon.snapshot import Snapshot
from syncd.errors import plain
from syncd.protocol.step import StepState
from syncd.protocol.version import BELIEVED_GENERATION, MISSING_MARKER

LASTING = 1.0  # seconds that a marker must be wrong before that is worth reporting

Problem = tuple[str, str]  # a stable name, and what is wrong


def symptoms(snapshot: Snapshot) -> Iterator[Problem]:
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
    yield from _documents(snapshot)


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
