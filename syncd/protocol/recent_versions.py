"""The versions that an engine has run of late, which its explorer keeps in the `info` of its presence.

A presence is read every few seconds, and an engine may run several versions in between. The list is for people: the
daemon's journal has it (`versions_applied`), and no decision follows from it.
"""

from typing import Any, NamedTuple

from syncd.protocol.presence import Presence
from syncd.protocol.version import Pair

RECENT = "recent"
"""The key in `info`."""

MOST_RECENT = 64
"""Versions in the list."""

KEPT_FOR = 30.0
"""Seconds for which a version stays in the list, counted when the next one comes."""

_LONGEST = 40
"""Letters of an engine's state."""


class RecentVersion(NamedTuple):
    """A version that an engine has confirmed."""

    generation: int
    step: int
    at: float  # when it was confirmed: seconds since the epoch on the explorer's clock
    state: str | None  # the engine's state then, None if the explorer reports none


def with_recent(before: Presence, pair: Pair | None, at: float, state: str | None) -> list[RecentVersion]:
    """Return the list with a version that is confirmed now; one that runs already is not new."""
    recent = recent_of(before)
    if pair is None or pair == before.applied:
        return recent
    kept = [version for version in recent if 0 <= at - version.at <= KEPT_FOR]
    return [*kept, RecentVersion(*pair, round(at, 3), state)][-MOST_RECENT:]


def recent_of(presence: Presence) -> list[RecentVersion]:
    """Return the list of a presence, oldest first; entries that are none are left out."""
    entries = presence.info.get(RECENT)
    listed = entries[-MOST_RECENT:] if isinstance(entries, list) else []
    return [version for entry in listed if (version := _version(entry)) is not None]


def _version(entry: Any) -> RecentVersion | None:
    match entry:
        case [int(generation), int(step), int() | float() as at, str() | None as state]:
            return RecentVersion(generation, step, float(at), state and state[:_LONGEST])
    return None
