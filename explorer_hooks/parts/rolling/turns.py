"""Whether a follower may load a version now, by the wave: pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncd.protocol.rolling import Wave
from syncd.protocol.version import Pair


def target(wave: Wave, name: str, newest: Pair | None, applied: Pair | None) -> Pair | None:
    """Return the version that an explorer goes to, None if there is none that it may run.

    It fetches a candidate, too: once that is approved, the load is all that is left.
    """
    if newest is None:
        return None
    stopped = wave.stopped_pairs
    for version in (wave.admitted.get(name), wave.approved, wave.candidate):
        if version is None or version.pair in stopped:
            continue
        if applied is None or applied in stopped or applied < version.pair:
            return version.pair
    return applied


def is_admitted(wave: Wave, name: str, pair: Pair, applied: Pair | None) -> bool:
    """Return whether the leader lets an explorer load a version now."""
    if pair in wave.stopped_pairs:
        return False
    # One that runs no version has no work to lose: it need not wait for what is known to be good.
    if applied is None and wave.approved is not None and pair == wave.approved.pair:
        return True
    slot = wave.admitted.get(name)
    return slot is not None and slot.pair == pair and not (slot.free and applied is not None)


@dataclass(frozen=True, slots=True)
class Other:
    """An explorer that waits for the same wave, as its presence says."""

    name: str
    unit: str
    applied: Pair | None = None
    is_loading: bool = False  # whether it has paused, and has not done so for longer than `patience`
    has_given_up: bool = False  # whether it has given up what is approved


def goes_alone(wave: Wave, name: str, pair: Pair, others: Sequence[Other]) -> bool:
    """Return whether an explorer loads a version while nobody leads.

    It loads only what is approved. All go in the order of their names, as many at once as the wave says, so that two
    that cannot see each other's last step do not go for one place. `others` are all living explorers that wait for
    the wave, this one among them.
    """
    approved = wave.approved
    if approved is None or pair != approved.pair or pair in wave.stopped_pairs:
        return False
    behind = [
        other
        for other in others
        if other.applied is not None and other.applied < pair and not other.has_given_up
    ]
    loading = {other.unit for other in others if _pauses(other) or _may_load(wave, other, behind)}
    order = _in_order(other.unit for other in behind if other.unit not in loading)
    mine = next((other.unit for other in others if other.name == name), name)
    return mine in loading or (mine in order and len(loading) + order.index(mine) < wave.limit)


def _pauses(other: Other) -> bool:
    """Return whether another one loads and had work to lose."""
    return other.is_loading and other.applied is not None


def _may_load(wave: Wave, other: Other, behind: Sequence[Other]) -> bool:
    """Return whether another one may load what the last leader admitted it to."""
    slot = wave.admitted.get(other.name)
    is_open = slot is not None and not slot.free and other.applied is not None and other.applied < slot.pair
    return is_open and other in behind


def _in_order(units: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(units))
