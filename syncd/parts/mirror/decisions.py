"""What a mirror does next, which versions an object store keeps, how long to wait: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncd.parts.mirror.links import Way
from syncd.protocol.version import Pair

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0


def choose_way(newest: Way, begun: Way | None) -> Way:
    """Return which version to copy: the newest one, or the one that was begun while less of that is left.

    Versions in between are never copied for their own sake, so a mirror that is behind skips to the newest one. What
    is left of the chosen one only shrinks, so it arrives however fast new ones come.
    """
    if begun is None or begun.version.pair >= newest.version.pair:
        return newest
    return begun if begun.left <= newest.left else newest


def lag(published: Pair | None, newest: Pair | None) -> int:
    """Return how many steps the target is behind; at least 1 while it lacks the newest version."""
    if newest is None or (published is not None and published >= newest):
        return 0
    return max(newest[1] - (published[1] if published else 0), 1)


def next_wait(failures: int) -> float:
    """Return the seconds until the next attempt after so many failures in a row."""
    return min(FIRST_WAIT * 2.0 ** min(failures - 1, 16), LONGEST_WAIT)


@dataclass(frozen=True, slots=True)
class StoredStep:
    key: str
    parent: str = ""  # the key of what it is stored as changes of, empty for a step stored whole
    size: int = 0


@dataclass(frozen=True, slots=True)
class PastVersion:
    """A version that an object store has published."""

    generation: int
    step: int
    key: str
    at: float | None = None  # when it was published, by the store's clock; None if not known yet


def kept_versions(
    history: Sequence[PastVersion], keep: int, grace: float, now: float | None
) -> tuple[PastVersion, ...]:
    """Return the `keep` newest versions, and each that a reader may have begun to copy within the grace.

    A reader takes the newest version, so it may have begun with one until the next one was published. `history` is
    oldest first; `now` is by the store's clock, None if it is not known, and all are kept.
    """
    if now is None:
        return tuple(history)
    recent = history[-max(keep, 1) :]
    older = history[: len(history) - len(recent)]
    followed_at = [after.at for after in history[1 : len(older) + 1]]
    begun = [
        version for version, at in zip(older, followed_at, strict=True) if at is None or now - at < grace
    ]
    return *begun, *recent


def needed_keys(versions: Sequence[PastVersion], steps: Mapping[str, StoredStep]) -> frozenset[str]:
    """Return the steps that versions need: their own, and all that these are stored as changes of."""
    needed: set[str] = set()
    waiting = [version.key for version in versions]
    while waiting:
        key = waiting.pop()
        if key in needed or key not in steps:
            continue
        needed.add(key)
        waiting.append(steps[key].parent)
    return frozenset(needed)
