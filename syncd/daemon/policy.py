"""Policies as data: what to keep, whom to trust, when to verify. Combined by union: any rule that keeps, keeps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncd.config import DaemonConfig


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps to keep beside those that are never removed (docs/retention.md).

    Args:
        keep_last: Newest sync steps to keep, at least 1.
        keep_every: Keep each sync step that is a multiple of this; 0 for none.
        keep_full: Newest full checkpoints to keep; 0 for all.
        keep_previous: Keep the version published before, even if it is a full checkpoint beyond `keep_full`.
        max_bytes: Remove the oldest of what only `keep_last` and `keep_every` keep while all steps together
            are larger than this; 0 for no limit.
        partial_grace: Seconds without a change after which a step that will not be finished (a newer one is
            complete) is removed.
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_full: int = 0
    max_bytes: int = 0
    partial_grace: float = 3600.0
    keep_previous: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plan follows.

    Args:
        retention: What to keep.
        prune: Whether anything is removed at all.
        prune_foreign: Whether steps that others wrote may be removed.
        rewind_settle: Seconds a marker that goes back must stand still before explorers follow: a marker that is
            written in place may be read half written.
        settle: Seconds a foreign step without a marker of its own must stand still before it counts.
    """

    retention: Retention = Retention()
    prune: bool = True
    prune_foreign: bool = False
    rewind_settle: float = 1.0
    settle: float = 2.0


def policy_of(config: "DaemonConfig") -> Policy:
    """Return the policy that a configuration asks for."""
    retention = Retention(
        config.keep_last,
        config.keep_every,
        config.keep_full,
        config.max_bytes,
        config.partial_grace,
        config.keep_previous,
    )
    return Policy(retention, config.prune, config.prune_foreign, config.rewind_settle, config.settle)
