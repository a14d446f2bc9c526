"""What is worth saying about a snapshot, whatever is planned: pure, for the log and for `syncd status`."""

from collections.abc import Iterator

from syncd.daemon.snapshot import Snapshot
from syncd.errors import plain
from syncd.protocol.marker import MISSING_MARKER
from syncd.protocol.step import StepState
from syncd.protocol.version import BELIEVED_GENERATION

LASTING = 1.0
"""Seconds that a marker must be wrong before it is worth saying."""


def symptoms(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the marker and with what is published: a stable name, and what it is."""
    marker, version = snapshot.marker, snapshot.version
    # A marker that is written in place is empty or torn for a moment at each step: that is no news.
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
        yield "unreadable_presence", f"no step is removed while it lives, it may read any: {module}"
    for problem in snapshot.unlisted:
        yield "unreadable_directory", f"no step is removed, any may be leased or pinned: {problem}"
    if snapshot.tracker_problem:
        yield "tracker", f"no full checkpoint is removed, it may name any: {snapshot.tracker_problem}"
    for problem in snapshot.obstacles:
        yield "obstacle", problem
    if snapshot.version_problem:
        yield "version", snapshot.version_problem
    if version and version.kind != "remote" and _is_missing(snapshot, version.step):
        yield "published_step", f"step {version.step} is published and no longer complete"
    yield from _documents(snapshot)


def _documents(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the documents that count for nothing, or for less than they say."""
    for path, problem in {**snapshot.unreadable_pins, **snapshot.unreadable_requests}.items():
        yield "document", f"{plain(path)}: {problem}"
    for name, module in snapshot.explorers.items():
        applied = module.presence.applied
        if applied is not None and applied[0] > BELIEVED_GENERATION:
            yield "document", f"explorer {name} names generation {applied[0]}, which is not believed"


def _should_have_marker(snapshot: Snapshot) -> bool:
    """Say whether there are steps that a marker announces: verl's tracker does as well for its own."""
    if any(step.is_native for step in snapshot.steps.values()):
        return True
    return snapshot.tracker is None and any(step.announced_by == "marker" for step in snapshot.steps.values())


def _is_missing(snapshot: Snapshot, number: int) -> bool:
    step = snapshot.steps.get(number)
    return step is None or step.state is not StepState.COMPLETE
