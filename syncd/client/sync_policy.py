"""Sync methods, sync styles, and when a trainer or an explorer needs a sync. Pure functions.

Names, aliases and the pull table are those of the system that this one replaces; see docs/publish.md.
"""

from enum import StrEnum
from typing import TypeVar

from syncd.protocol.version import Pair

E = TypeVar("E", bound=StrEnum)

TRANSPORTS = "syncd.transports"
"""The entry point group of transports; their names are further values of `sync.method`."""

NOTHING = -1  # the version of an explorer that has loaded no version


class SyncMethod(StrEnum):
    """How weights travel. Any case; `online` is nccl, `offline` checkpoint, `auto` the fastest in the last syncs."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> "SyncMethod | None":
        return _named(cls, value, {"online": "nccl", "offline": "checkpoint"})


class SyncStyle(StrEnum):
    """Who decides when to sync. Any case; `dynamic_by_trainer` and `dynamic_by_explorer` are older names."""

    FIXED = "fixed"
    TRAINER_DRIVEN = "trainer_driven"
    EXPLORER_DRIVEN = "explorer_driven"
    FULLY_ASYNC = "fully_async"

    @classmethod
    def _missing_(cls, value: object) -> "SyncStyle | None":
        older = {"dynamic_by_trainer": "trainer_driven", "dynamic_by_explorer": "explorer_driven"}
        return _named(cls, value, older)


def should_load(current: int, offered: int) -> bool:
    """Return whether an explorer at step `current` loads the step `offered`.

    Every explorer starts with step 0, so it is never loaded; a step below the present one is a rewind.
    """
    return offered > 0 and offered != current


def is_new(current: int, applied: Pair | None, offered: Pair) -> bool:
    """Return whether a published pair is news to an explorer.

    Args:
        current: The step that the explorer says it is at.
        applied: The pair that it has this step from, None if unknown.
    """
    if applied is not None and applied[1] == current:
        return offered > applied
    return offered[1] != max(current, 0)


def explorer_needs_sync(step: int, interval: int = 1, offset: int = 0) -> bool:
    """Return whether an explorer syncs after its step; work in flight is drained first."""
    return step > offset and (step - offset) % interval == 0


def trainer_needs_sync(
    style: SyncStyle, step: int, last_synced: int, interval: int = 1, *, explorer_asks: bool = False
) -> bool:
    """Return whether a trainer syncs at its step: every `interval` steps or, if explorers decide, when one asks."""
    if step == last_synced:
        return False
    return explorer_asks if style is SyncStyle.EXPLORER_DRIVEN else step % interval == 0


def _named(kind: type[E], value: object, aliases: dict[str, str]) -> E | None:
    lowered = str(value).lower()
    wanted = aliases.get(lowered, lowered)
    return next((member for member in kind if member.value == wanted), None)
