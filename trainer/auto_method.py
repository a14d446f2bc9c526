"""Chooses the transport of each sync for `sync.method = "auto"`: the one that took the least time in the last syncs.

All others are measured again from time to time, the less often the slower they were: so one that got faster is found,
and slow ones cost little. Rank 0 knows what its own part took; what an explorer's load took, and from where, is in
the explorer's presence.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import structlog

from syncd.client.client import Client
from syncd.client.sync_policy import SyncMethod
from syncd.errors import SyncdError
from syncd.protocol.presence import Presence
from syncd.transports.base import FILES, Sent, WeightSender, transport_names
from syncd.transports.measured import ExplorerLoad, due_after, fastest, load_of

AUTO = SyncMethod.AUTO.value

ORDER = (FILES, SyncMethod.MEMORY.value, SyncMethod.NCCL.value)
"""The transports to choose from, in the order of their first measurement; of two equal ones the earlier wins."""

BEGINNING = 2
"""Syncs through files in a row that are not counted because they are whole and begin deltas: the second may have a
shortcut, which shows what changes take."""

_MAX_PENDING = 4  # syncs whose loads are still waited for: explorers may load late


def senders_of(method: str) -> tuple[str, ...]:
    installed = (FILES, *transport_names())
    return tuple(name for name in ORDER if name in installed) if method == AUTO else (method,)


@dataclass(frozen=True, slots=True)
class Measured:
    number: int  # the sync that measured it; syncs are counted from 1
    size: int = 0  # bytes of the weights
    # From the trainer's call until the slowest explorer had them; None if it did not deliver them.
    seconds: float | None = None
    failures: int = 0  # how many times in a row it did not


@dataclass(slots=True)
class Measurements:
    number: int = 0  # the sync, from 1
    size: int = 0  # bytes of the weights; 0 if unknown
    ways: dict[str, Measured] = field(default_factory=dict)  # the last measurement of each transport
    lacking: Mapping[str, str] = field(default_factory=dict)  # transports that are unavailable now, and why
    present: str = FILES  # the transport that was last chosen for its speed


@dataclass(frozen=True, slots=True)
class MethodChoice:
    method: str
    reason: str  # why, for people
    expected: Mapping[str, float]  # seconds that each measured transport would take
    is_trial: bool = False  # whether it is chosen only to measure it


class MethodChooser:
    """Rank 0's side of `auto`."""

    def __init__(self, client: Client) -> None:
        self._client, self._log = client, structlog.get_logger()
        self._now = Measurements()
        self._pending: dict[int, tuple[int, Sent]] = {}
        self._last: Sent | None = None
        self._beginning = 0

    def next_method(self, senders: Mapping[str, WeightSender], sent: Sent | None) -> str:
        """Return the transport of the next sync, and log why; if explorers' presences cannot be read, files."""
        try:
            return self._next_method(senders, sent)
        except (SyncdError, OSError) as error:
            self._log.warning("method_choice_failed", way=FILES, reason=str(error))
            return FILES

    def _next_method(self, senders: Mapping[str, WeightSender], sent: Sent | None) -> str:
        now = self._now
        if sent is not None and sent != self._last:
            self._last = sent
            now.size = sent.size or now.size
            if self._counts(sent):
                self._pending[sent.step] = now.number, sent
        now.number += 1
        self._collect(self._client.explorers.living().values())
        now.lacking = {name: reason for name in ORDER if (reason := _unavailable(senders, name))}
        choice = choose_method(now)
        if not choice.is_trial:
            now.present = choice.method
        self._log.info("method_chosen", way=choice.method, reason=choice.reason, trial=choice.is_trial)
        return choice.method

    def _counts(self, sent: Sent) -> bool:
        """Return whether a sync shows what the next ones by its transport take."""
        begins = sent.method == FILES and sent.begins_deltas
        self._beginning = self._beginning + 1 if begins else 0
        return self._beginning == 0 or self._beginning > BEGINNING

    def _collect(self, living: Collection[Presence]) -> None:
        loads = [load for presence in living if (load := load_of(presence.info)) is not None]
        for step, (number, sent) in list(self._pending.items()):
            measurement = measured(number, sent, [load for load in loads if load.step == step])
            if measurement is not None:
                self._keep(sent.method, measurement)
            if measurement is not None or self._now.number - number > _MAX_PENDING:
                del self._pending[step]

    def _keep(self, method: str, new: Measured) -> None:
        before = self._now.ways.get(method)
        if before is not None and before.number > new.number:
            return
        failures = before.failures + 1 if before is not None and new.seconds is None else new.failures
        self._now.ways[method] = replace(new, failures=failures)


def _unavailable(senders: Mapping[str, WeightSender], name: str) -> str:
    return senders[name].unavailable() if name in senders else "the engine did not open it"


def measured(number: int, sent: Sent, loads: Collection[ExplorerLoad]) -> Measured | None:
    """Return the measurement that a sync is, None while it is unknown."""
    failed = Measured(number, sent.size, None, failures=1)
    if not sent.is_done:
        return failed
    if sent.is_received:
        return Measured(number, sent.size, sent.seconds)
    if not loads:
        return None
    if sent.method != FILES and all(load.source != sent.method for load in loads):
        return failed
    return Measured(number, sent.size, sent.seconds + max(load.seconds for load in loads))


def choose_method(now: Measurements) -> MethodChoice:
    able = [method for method in ORDER if method == FILES or method not in now.lacking]
    expected = {method: seconds for method in able if (seconds := _expected(now, method)) is not None}
    unknown = [method for method in able if method not in now.ways]
    if unknown:
        return MethodChoice(unknown[0], f"{unknown[0]} was not measured yet", expected, is_trial=True)
    if len(able) == 1:
        why = "; ".join(f"{method} is unavailable: {text}" for method, text in sorted(now.lacking.items()))
        return MethodChoice(able[0], why or "there is no other transport", expected)
    best = _fastest(now, expected)
    overdue = [method for method in able if method != best.method and _is_due(now, method, expected)]
    if overdue:
        stalest = min(overdue, key=lambda method: now.ways[method].number)
        ago = now.number - now.ways[stalest].number
        return MethodChoice(stalest, f"{stalest} was measured {ago} syncs ago", expected, is_trial=True)
    return best


def _fastest(now: Measurements, expected: Mapping[str, float]) -> MethodChoice:
    if not expected:
        return MethodChoice(FILES, "no transport delivered the weights", expected)
    way, least = fastest(expected, now.present), min(expected, key=lambda method: expected[method])
    if way != least:
        reason = f"{least} would take about as long as {way}: {_shown(expected)}"
        return MethodChoice(way, reason, expected)
    return MethodChoice(way, f"{way} takes the least: {_shown(expected)}", expected)


def _is_due(now: Measurements, method: str, expected: Mapping[str, float]) -> bool:
    measured = now.ways[method]
    after = due_after(expected.get(method), min(expected.values(), default=0.0), measured.failures)
    return now.number - measured.number >= after


def _expected(now: Measurements, method: str) -> float | None:
    measured = now.ways.get(method)
    if measured is None or measured.seconds is None:
        return None
    return measured.seconds * (now.size / measured.size if now.size and measured.size else 1.0)


def _shown(expected: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {seconds:.3g} s" for method, seconds in expected.items())
