"""What one scan of a job found: frozen data, all that a plan may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.request import Pin, Request
from syncd.protocol.rolling import Wave
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import MISSING_MARKER, MarkerReading, Pair, Quarantined, Version


@dataclass(frozen=True, slots=True)
class Module:
    """An explorer or trainer as the daemon sees it."""

    presence: Presence
    alive: bool = True
    silent_for: float = 0.0

    @property
    def has_left(self) -> bool:
        return self.presence.status is RunningStatus.STOPPED


@dataclass(frozen=True, slots=True)
class Snapshot:
    # Every step directory by step; for a step without one, the attempt to write it that changed last.
    steps: Mapping[int, Step] = field(default_factory=dict)
    # The other attempts: of a step that has its directory, or that a later attempt writes.
    rivals: tuple[Step, ...] = ()
    marker: MarkerReading = MISSING_MARKER  # what the marker said
    marker_stable_for: float = 0.0  # seconds since the marker was seen to change
    tracker: int | None = None  # the step of the newest full checkpoint by the trainer's tracker file
    tracker_problem: str = ""  # what keeps the tracker from being read; then it may name any full checkpoint
    version: Version | None = None  # what is published, None before the first or when the file is damaged
    version_problem: str = ""  # what is wrong with the version file
    version_unread: bool = False  # whether it cannot be read, so that what is published is not known
    floor: Pair | None = None  # the highest pair that anyone is known to have seen published
    explorers: Mapping[str, Module] = field(default_factory=dict)  # by identity
    trainers: Mapping[str, Module] = field(default_factory=dict)  # by identity
    pins: Mapping[int, Pin] = field(default_factory=dict)  # by step
    requests: tuple[Request, ...] = ()  # open requests in the order of asking
    entry_problems: tuple[str, ...] = ()  # what keeps single files from being read, for people to read
    # Directories of presences or pins that cannot be listed, each with why: what is leased or pinned is not
    # known.
    unlisted: tuple[str, ...] = ()
    # What is wrong with files of pins, by path; they pin all the same.
    unreadable_pins: Mapping[str, str] = field(default_factory=dict)
    # The same of files of requests, which are passed over.
    unreadable_requests: Mapping[str, str] = field(default_factory=dict)
    free: int | None = None  # bytes free for the daemon's user on the job's file system, None where unknown
    wave: Wave | None = None  # who may load what, None if no versions are rolled out
    # What was written last failed for want of room, whatever `free` says: a quota does not show there.
    crowded: bool = False

    @property
    def hint(self) -> int | None:
        """Return the step that the trainer names as newest: by the marker, by the tracker where no marker is."""
        return self.tracker if self.marker.problem == "missing" else self.marker.step

    @property
    def unpublished(self) -> list[tuple[str, StepState, int, int]]:
        """Return what is there of steps that may be published next: directory, state, writers or shards, bytes."""
        newest = -1 if self.version is None else self.version.step
        waiting = [
            step for step in self.steps.values() if step.step > newest or step.state is StepState.FILLING
        ]
        return [(step.directory, step.state, step.present, step.size) for step in (*waiting, *self.rivals)]

    @property
    def job_size(self) -> int:
        return sum(step.size for step in self.steps.values())

    @property
    def put_aside(self) -> list[Quarantined]:
        """Return the quarantined steps that still exist: the version file remembers removed ones, too."""
        entries = self.version.quarantine if self.version else ()
        return [
            entry
            for entry in entries
            if entry.step in self.steps and self.steps[entry.step].digest == entry.digest
        ]

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
        holders: dict[int, list[str]] = {}
        for modules in (self.explorers, self.trainers):
            for name in sorted(modules):
                for step in modules[name].presence.leases if modules[name].alive else ():
                    holders.setdefault(step, []).append(name)
        return {step: tuple(names) for step, names in holders.items()}


def living(modules: Mapping[str, Module]) -> int:
    return sum(module.alive and not module.has_left for module in modules.values())


def lag_of(snapshot: Snapshot, module: Module) -> int | None:
    """Return how many steps an explorer is behind the version, None while it has loaded nothing."""
    if snapshot.version is None or module.presence.applied is None:
        return None
    generation, step = module.presence.applied
    behind = snapshot.version.step - step
    return max(behind, 0) if generation == snapshot.version.generation else max(behind, 1)
