"""Which way the next weights go out, as a pure function of what the last syncs took.

The way that took the least is taken again. Every other one is measured again now and then, the more seldom the slower
it was, so that a way that got better is found without paying much for those that did not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncd.client.sync_policy import SyncMethod

ORDER = (SyncMethod.CHECKPOINT, SyncMethod.MEMORY, SyncMethod.NCCL)
"""In which ways are measured first; where two take as long, the earlier one is taken."""

AGAIN = 16
"""Syncs after which a way is measured again that is as fast as the fastest; as many times more as it is slower."""

RARELY = 16
"""The largest such factor."""

STICKS = 0.9
"""Another way is taken once it takes less than this part of the present one's time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way, as it was last.

    Args:
        number: The sync that measured it; syncs are counted from 1.
        size: Bytes of the weights.
        seconds: From the trainer's call until the slowest explorer had them; None: they did not go that way.
        failures: How many times in a row they did not.
    """

    number: int
    size: int = 0
    seconds: float | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that is known before a sync.

    Args:
        number: The sync, from 1.
        size: Bytes of the weights; 0 where that is not known.
        ways: The last measurement of each way.
        lacking: Ways that cannot be taken now, and why.
        present: The way that was chosen for its speed last.
    """

    number: int
    size: int
    ways: Mapping[SyncMethod, Measured] = field(default_factory=dict)
    lacking: Mapping[SyncMethod, str] = field(default_factory=dict)
    present: SyncMethod = SyncMethod.CHECKPOINT


@dataclass(frozen=True, slots=True)
class Choice:
    """How the next weights go out.

    Args:
        method: The way.
        reason: Why, for people.
        expected: Seconds that each known way would take.
        is_trial: Whether it is taken only to measure it.
    """

    method: SyncMethod
    reason: str
    expected: Mapping[SyncMethod, float]
    is_trial: bool = False


def choose(now: Measurements) -> Choice:
    """Return how the next weights go out. Files can always be taken."""
    able = [method for method in ORDER if method is SyncMethod.CHECKPOINT or method not in now.lacking]
    expected = {method: seconds for method in able if (seconds := _expected(now, method)) is not None}
    unknown = [method for method in able if method not in now.ways]
    if unknown:
        return Choice(unknown[0], f"{unknown[0]} was not measured yet", expected, is_trial=True)
    if len(able) == 1:
        why = "; ".join(f"{method} cannot be taken: {text}" for method, text in sorted(now.lacking.items()))
        return Choice(able[0], why or "there is no other way", expected)
    best = _fastest(now, expected)
    overdue = [method for method in able if method is not best.method and _is_due(now, method, expected)]
    if overdue:
        stalest = min(overdue, key=lambda method: now.ways[method].number)
        ago = now.number - now.ways[stalest].number
        return Choice(stalest, f"{stalest} was measured {ago} syncs ago", expected, is_trial=True)
    return best


def due_after(measured: Measured, expected: float | None, least: float) -> int:
    """Return the syncs after which a way is measured again.

    Args:
        measured: Its last measurement.
        expected: Seconds that it would take; None where it failed.
        least: Seconds that the fastest way would take.
    """
    if expected is None:
        return AGAIN * min(1 << max(measured.failures - 1, 0), RARELY)
    factor = expected / least if least > 0 else float(RARELY)
    return AGAIN * max(1, min(int(factor), RARELY))


def _fastest(now: Measurements, expected: Mapping[SyncMethod, float]) -> Choice:
    fastest = min(expected, key=lambda method: expected[method], default=SyncMethod.CHECKPOINT)
    present = now.present
    if present in expected and present is not fastest and expected[fastest] > STICKS * expected[present]:
        reason = f"{fastest} would take about as long as {present}: {_shown(expected)}"
        return Choice(present, reason, expected)
    return Choice(fastest, f"{fastest} takes the least: {_shown(expected)}", expected)


def _is_due(now: Measurements, method: SyncMethod, expected: Mapping[SyncMethod, float]) -> bool:
    measured = now.ways[method]
    after = due_after(measured, expected.get(method), min(expected.values(), default=0.0))
    return now.number - measured.number >= after


def _expected(now: Measurements, method: SyncMethod) -> float | None:
    measured = now.ways.get(method)
    if measured is None or measured.seconds is None:
        return None
    return measured.seconds * (now.size / measured.size if now.size and measured.size else 1.0)


def _shown(expected: Mapping[SyncMethod, float]) -> str:
    return ", ".join(f"{method} {seconds:.3g} s" for method, seconds in expected.items())
