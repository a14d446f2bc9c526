"""What one look at a job found: frozen data, all that a plan may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from syncd.protocol.layout import parse_attempt_name
from syncd.protocol.marker import MISSING_MARKER, MarkerReading
from syncd.protocol.presence import Presence
from syncd.protocol.request import Pin, Request
from syncd.protocol.version import Pair, Version

NATIVE = "syncd"
"""The layout of steps written by this protocol; any other name is a foreign layout."""


UNKNOWN = "unknown"
"""The layout of a step that others wrote and that cannot be read."""


class State(StrEnum):
    """What a step directory is."""

    FILLING = "filling"
    COMPLETE = "complete"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Step:
    """One step directory as it is now.

    Args:
        step: The trainer's step.
        directory: Its name in the job directory.
        layout: Who wrote it: `syncd`, or the name of a foreign layout.
        state: filling: something is missing that may still come. complete: it can be loaded. damaged: it was
            sealed or announced and is not what it must be, or can never become complete.
        payload: What an engine loads, relative to the job directory; the URI of a remote step.
        kind: weights, delta, lora or remote.
        digest: The manifest's digest, or the fingerprint of a foreign step; empty while filling.
        present: Writers (receipts) or shards that are there.
        expected: Writers or shards that there must be, None while unknown.
        size: Bytes of what is there.
        full: It is a full checkpoint.
        parent: For a delta, the step it changes.
        shards: How many files of weights are there, and how many there must be; None where `present` and `expected`
            count them.
        problem: What is missing or wrong, for people to read.
        unreadable: It, or a part of it, cannot be read now: what it is, is not known.
        later: It was sealed by a later protocol than this code reads.
        announced_by: What tells that its writer is done: itself (a manifest, a ready file), the job's marker, or
            time, when it stands still.
        unchanged_for: Seconds of the daemon's clock since any of this was seen to change.
        arriving: It became complete lately, below what is published: its writer may be about to go back to it.
    """

    step: int
    directory: str
    layout: str = NATIVE
    state: State = State.FILLING
    payload: str = ""
    kind: str = "weights"
    digest: str = ""
    present: int = 0
    expected: int | None = None
    size: int = 0
    full: bool = False
    parent: int | None = None
    shards: tuple[int, int] | None = None
    problem: str = ""
    unreadable: bool = False
    later: bool = False
    announced_by: Literal["itself", "marker", "time"] = "itself"
    unchanged_for: float = 0.0
    arriving: bool = False

    @property
    def is_attempt(self) -> bool:
        """Say whether it is an attempt to write the step, in a directory of its own, that nobody has sealed."""
        return parse_attempt_name(self.directory) is not None

    @property
    def is_native(self) -> bool:
        """Say whether this protocol's writer wrote it."""
        return self.layout == NATIVE


@dataclass(frozen=True, slots=True)
class Module:
    """An explorer or trainer as the daemon sees it."""

    presence: Presence
    alive: bool = True
    silent_for: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a job.

    Args:
        steps: Every step directory by step; for a step without one, the attempt to write it that changed last.
        rivals: The other attempts: of a step that has its directory, or that a later attempt writes.
        marker: What the marker said.
        marker_stable_for: Seconds since the marker was seen to change.
        tracker: The step of the newest full checkpoint by the trainer's tracker file.
        tracker_problem: What keeps the tracker from being read; then it may name any full checkpoint.
        version: What is published, None before the first or when the file is damaged.
        version_problem: What is wrong with the version file.
        floor: The highest pair that anyone is known to have seen published.
        explorers: By identity.
        trainers: By identity.
        pins: By step.
        requests: Open requests in the order of asking.
        obstacles: What keeps single files from being read, for people to read.
        unlisted: Directories of presences or pins that cannot be listed, each with why: what is leased or pinned
            is not known.
        unreadable_pins: What is wrong with files of pins, by path; they pin all the same.
        unreadable_requests: The same of files of requests, which are passed over.
        free: Bytes free for the daemon's user on the job's file system, None where unknown.
        crowded: What was written last failed for want of room, whatever `free` says: a quota does not show there.
    """

    steps: Mapping[int, Step] = field(default_factory=dict)
    rivals: tuple[Step, ...] = ()
    marker: MarkerReading = MISSING_MARKER
    marker_stable_for: float = 0.0
    tracker: int | None = None
    tracker_problem: str = ""
    version: Version | None = None
    version_problem: str = ""
    floor: Pair | None = None
    explorers: Mapping[str, Module] = field(default_factory=dict)
    trainers: Mapping[str, Module] = field(default_factory=dict)
    pins: Mapping[int, Pin] = field(default_factory=dict)
    requests: tuple[Request, ...] = ()
    obstacles: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    unreadable_pins: Mapping[str, str] = field(default_factory=dict)
    unreadable_requests: Mapping[str, str] = field(default_factory=dict)
    free: int | None = None
    crowded: bool = False

    @property
    def hint(self) -> int | None:
        """Return the step that the trainer names as newest: by the marker, by the tracker where no marker is."""
        return self.tracker if self.marker.problem == "missing" else self.marker.step

    @property
    def job_size(self) -> int:
        """Return the bytes of all steps."""
        return sum(step.size for step in self.steps.values())

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Return the modules that live and whose presence cannot be read, each with why: they may lease anything."""
        return tuple(
            f"{kind} {name}: {module.presence.problem}"
            for kind, modules in (("explorer", self.explorers), ("trainer", self.trainers))
            for name, module in modules.items()
            if module.alive and module.presence.problem
        )

    @property
    def leases(self) -> Mapping[int, tuple[str, ...]]:
        """Return who leases each leased step; the dead lease nothing. A trainer leases what it adds files to."""
        found: dict[int, list[str]] = {}
        for modules in (self.explorers, self.trainers):
            for name in sorted(modules):
                for step in modules[name].presence.leases if modules[name].alive else ():
                    found.setdefault(step, []).append(name)
        return {step: tuple(names) for step, names in found.items()}
