"""What a stage does about steps that are still being written: a pure function of a snapshot. Imports no torch."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from syncd.protocol.write_progress import WriteProgress

STILL = 10.0
"""Seconds without progress after which an attempt is not followed any more, and what was copied of it is removed."""

LOST = 5.0
"""Seconds after which an attempt that is neither there nor sealed is abandoned."""

UNUSED = 300.0
"""Seconds for which the copy of a sealed step waits for the engine."""

WASTED = 2
"""Copies for nothing, one after the other, after which none is begun until a version is published."""


class AttemptKey(NamedTuple):
    step: int
    attempt: str


@dataclass(frozen=True, slots=True)
class SeenAttempt:
    """An attempt whose directory is there."""

    key: AttemptKey
    notes: tuple[WriteProgress, ...]
    changed_ago: float | None
    """Seconds since its notes changed; None if this process has not seen them change."""

    @property
    def size(self) -> int:
        """Return the bytes of its shard files; while not all writers have left a note, what they may be."""
        missing = max((note.world_size for note in self.notes), default=0) - len(self.notes)
        largest = max((note.size for note in self.notes), default=0)
        return sum(note.size for note in self.notes) + max(missing, 0) * largest


@dataclass(frozen=True, slots=True)
class CopyState:
    """The copy of an attempt that this process makes, or has made."""

    key: AttemptKey
    changed_ago: float | None = None
    """Seconds since the attempt's notes changed; None if its directory is gone."""
    gone_for: float = 0.0  # seconds since that was seen last
    is_sealed: bool = False  # whether its step is sealed, by whichever attempt
    is_other: bool = False  # whether it was sealed by another one, or with other digests
    is_staged: bool = False  # whether the stage has a copy of that step already
    is_revoked: bool = False  # whether its room was taken, or it could not be written


@dataclass(frozen=True, slots=True)
class EarlySnapshot:
    attempts: tuple[SeenAttempt, ...]
    held: CopyState | None
    tried: AbstractSet[AttemptKey]
    """What was begun before, by any process of this host that this one has seen."""
    wasted: int  # copies for nothing since the last version was published
    free: int  # bytes of the stage that are free


class Begin(NamedTuple):
    key: AttemptKey


class Drop(NamedTuple):
    reason: str
    is_waste: bool = True


def decide(seen: EarlySnapshot) -> Begin | Drop | None:
    """Return which attempt is copied from now on, or why the copy that there is goes; at most one is held."""
    moving = [attempt for attempt in seen.attempts if attempt.key not in seen.tried and _is_moving(attempt)]
    if seen.held is not None:
        return _why_dropped(seen.held, is_late=any(attempt.key > seen.held.key for attempt in moving))
    if seen.wasted >= WASTED:
        return None
    fit = (attempt.key for attempt in moving if attempt.size <= seen.free)
    newest = max(fit, default=None)
    return Begin(newest) if newest else None


def _is_moving(attempt: SeenAttempt) -> bool:
    return bool(attempt.notes) and attempt.changed_ago is not None and attempt.changed_ago < STILL


def _why_dropped(held: CopyState, *, is_late: bool) -> Drop | None:
    if held.is_revoked:
        return Drop("its room was needed, or it could not be written")
    if held.is_other:
        return Drop("the step was sealed with other content")
    if held.is_staged:
        return Drop("the stage has the version already", is_waste=False)
    if held.is_sealed:
        return Drop("no engine took the version") if is_late or held.gone_for >= UNUSED else None
    if held.changed_ago is None:
        return Drop("the attempt was abandoned") if held.gone_for >= LOST else None
    return Drop("the attempt is not written any more") if held.changed_ago >= STILL else None
