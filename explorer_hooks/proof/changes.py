"""Whether an engine changed with the versions that it loaded: its answers since an earlier proof, and the trainer's.

Trainer and engine differ from each other by the noise of their kernels, at each version anew. Between two versions
the answers of an engine that loads change as the trainer's do; those of one that stays do not. The test asks for the
slope of the one change over the other, token by token. It needs no estimate of a variance: the errors of a right
engine are as often above the line as below it, so an exact bound for sums of random signs gives the chance of a false
alarm.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from explorer_hooks.hook import ProbeAnswer
from syncd.protocol.probe import Probe

START = "start"
"""What a proof calls the model that the engine was started with."""

LEVEL = 1e-6
"""The chance that a right engine fails the test at one version."""

SLACK = 0.05
"""The part of a change that a right engine may lack: kernels differ a little more as values grow."""

SPREAD = 1.5
"""How much larger the trainer's noise may be, as a variance, than all noise was at the anchor."""

LEAST = 1e-5
"""The mean change below which nothing is tested, in nats: probes have 7 digits, and float32 rounds."""

KEPT = 16
"""The most anchors that are kept."""

_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""The missing parts of a change for which it is computed whether they would be found."""

_GRID = tuple(1e-2 * 1.5**power for power in range(34))

_Values = tuple[float, ...]


class Anchor(NamedTuple):
    version: str
    probe: Probe
    answers: tuple[ProbeAnswer, ...]  # each replica's
    content: tuple[str, ...] = ()  # the digests of its shards, if they are known


@dataclass(frozen=True, slots=True)
class Change:
    """How trainer and engine have changed since an anchor, token by token."""

    since: str
    trainer: _Values
    engine: _Values
    noise: _Values  # how far the engine was from the trainer at the anchor

    @property
    def is_seen(self) -> bool:
        """Return whether the trainer has changed by half the noise: then an engine that changed too shows it."""
        return _mean(self.trainer) > max(_mean(self.noise) / 2, LEAST)

    @property
    def is_none(self) -> bool:
        """Return whether the engine gives its old answers, up to the digits that are kept of them."""
        return max(map(abs, self.engine)) <= LEAST / 2

    def chance(self, lacking: float = 0.0) -> float:
        """Return the logarithm of the chance that a right engine lacks as much of the change as this one.

        Args:
            lacking: A part of the change that is taken away from the engine's first.
        """
        expected, cap = (1 - SLACK) * self._visible() + lacking, _middle(self.trainer)
        pairs = zip(self.trainer, self.engine, strict=True)
        return log_chance([max(-cap, min(x, cap)) * (expected * x - y) for x, y in pairs])

    def _visible(self) -> float:
        """Return the slope of a right engine: below 1, because the trainer's noise is in its change too.

        All noise at the anchor is taken for the trainer's, there and at the new version.
        """
        moved = _square(self.trainer)
        return max(0.0, 1 - 2 * SPREAD * _square(self.noise) / moved) if moved else 0.0


class Anchors:
    """The versions that an engine has proven: some from the first to the last, and those that it answers most like.

    While an engine stays on one version, its answers stay nearest to the probe of that one, which is therefore kept
    however many follow.
    """

    def __init__(self) -> None:
        self._kept: list[Anchor] = []
        self._nearest: list[Anchor] = []
        self._every, self._skipped, self._last = 1, 0, ""

    def __iter__(self) -> Iterator[Anchor]:
        yield from self._kept
        yield from (anchor for anchor in self._nearest if anchor not in self._kept)

    def add(self, anchor: Anchor) -> None:
        """Keep a version, or every second, fourth, eighth ... once there are many."""
        same = [one for one in (*self, anchor) if one.probe.digest == anchor.probe.digest]
        answers = [_flat(answer.logprobs) for answer in anchor.answers]
        distances = [
            lambda one, to=answer: _mean(_minus(_flat(one.probe.logprobs), to)) for answer in answers
        ]
        self._nearest = [min(same, key=distance) for distance in distances]
        if anchor.version == self._last:
            return
        self._last = anchor.version
        self._skipped += 1
        if self._skipped < self._every and self._kept:
            return
        self._skipped = 0
        self._kept.append(anchor)
        if len(self._kept) > KEPT:
            del self._kept[1::2]  # the first stays
            self._every *= 2

    def changes(self, new: Anchor) -> list[list[Change]]:
        anchors = [anchor for anchor in self if _can_compare(anchor, new)]
        return [[_change(anchor, new, replica) for anchor in anchors] for replica in range(len(new.answers))]


def _can_compare(anchor: Anchor, new: Anchor) -> bool:
    is_other = anchor.version != new.version and (not new.content or anchor.content != new.content)
    return is_other and anchor.probe.digest == new.probe.digest and len(anchor.answers) == len(new.answers)


def stayed(changes: Sequence[Change]) -> str:
    """Return why an engine has not changed as the trainer has, empty if nothing shows that."""
    seen = [change for change in changes if change.is_seen]
    for change in reversed(seen):  # the nearest version first
        if change.is_none:
            return f"the engine answers exactly as it did on {_named(change.since)}: it was not loaded"
    if not seen:
        return ""
    chance, since = min((change.chance(), at) for at, change in enumerate(seen))
    if chance > math.log(LEVEL / len(seen)):
        return ""
    return (
        f"since {_named(seen[since].since)} the engine's answers changed by {_slope(seen[since]):.2f} of what the "
        "trainer's did: it was not loaded, or a part of it alone"
    )


def least_seen(changes: Sequence[Change]) -> tuple[float, str] | None:
    """Return the least part of a change whose absence would have been found, and since which version; None if none.

    The largest change says most. Of a whole one that is just seen, only an engine that gives the same answers
    again would be found.
    """
    seen = [change for change in changes if change.is_seen]
    if not seen:
        return None
    largest, level = max(seen, key=lambda change: _square(change.trainer)), math.log(LEVEL / len(seen))
    least = next((share for share in _SHARES if largest.chance(share) < level), 1.0)
    return least, largest.since


def log_chance(terms: Sequence[float]) -> float:
    """Return the logarithm of an upper bound of the chance that terms with random signs have as large a sum."""
    largest = max(map(abs, terms), default=0.0)
    total = math.fsum(terms)
    if total <= 0 or not math.isfinite(total):
        return 0.0
    sizes, total = [abs(term) / largest for term in terms], total / largest
    return min(0.0, *(_log_bound(at, sizes, total) for at in _GRID))


def _log_bound(at: float, sizes: Sequence[float], total: float) -> float:
    """Return the logarithm of Chernoff's bound at one point: of exp(-at total) times the product of cosh(at size)."""
    return -at * total + math.fsum(
        at * size + math.log1p(math.exp(-2 * at * size)) - math.log(2) for size in sizes
    )


def _change(anchor: Anchor, new: Anchor, replica: int) -> Change:
    trainer, engine = _flat(anchor.probe.logprobs), _flat(anchor.answers[replica].logprobs)
    return Change(
        anchor.version,
        _minus(_flat(new.probe.logprobs), trainer),
        _minus(_flat(new.answers[replica].logprobs), engine),
        _minus(engine, trainer),
    )


def _slope(change: Change) -> float:
    moved = math.fsum(x * x for x in change.trainer)
    return math.fsum(x * y for x, y in zip(change.trainer, change.engine, strict=True)) / moved


def _named(version: str) -> str:
    return "its start model" if version == START else f"version {version}"


def _flat(rows: Sequence[Sequence[float]]) -> _Values:
    return tuple(value for row in rows for value in row)


def _minus(values: _Values, others: _Values) -> _Values:
    return tuple(a - b for a, b in zip(values, others, strict=True))


def _middle(values: _Values) -> float:
    return sorted(map(abs, values))[len(values) // 2]


def _mean(values: _Values) -> float:
    return math.fsum(map(abs, values)) / len(values)


def _square(values: _Values) -> float:
    return math.fsum(value * value for value in values) / len(values)
