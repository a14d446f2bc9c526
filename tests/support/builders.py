"""Snapshots made by hand for the tests of pure functions."""

from syncd.daemon.snapshot import Snapshot
from syncd.protocol.layout import step_name
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import MarkerReading, Version, parse_marker


def complete(number: int, digest: str | None = None, **more) -> Step:
    return Step(
        number,
        step_name(number),
        state=StepState.COMPLETE,
        payload=f"{step_name(number)}/actor",
        digest=digest or f"sha256:{number:064x}",
        present=1,
        expected=1,
        size=100,
        **more,
    )


def filling(number: int) -> Step:
    return Step(number, step_name(number), present=1, expected=2)


def snapshot(
    *steps: Step, marker: int | bytes | None = None, version: Version | None = None, **more
) -> Snapshot:
    text = b"" if marker is None else str(marker).encode() if isinstance(marker, int) else marker
    reading = MarkerReading(None, problem="missing") if marker is None else parse_marker(text)
    more.setdefault("marker_stable_for", 60.0)
    return Snapshot(steps={step.step: step for step in steps}, marker=reading, version=version, **more)


def published(step: Step, generation: int = 1, **more) -> Version:
    return Version(generation, step.step, step.kind, step.payload, step.digest, layout=step.layout, **more)
