"""What is done to which part, and when: all of it follows from the seed."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TRAINER = "trainer"
DAEMONS = ("watch-a", "watch-b")
REST = 3.0
"""Seconds in which nothing else is done to a part, or to the disk, once it is left alone again."""

# How often each is done, against the others.
KINDS = {"kill": 6, "restart": 2, "stop": 4, "cut": 3, "rewind": 2, "fill": 1, "freeze": 1}
ON_DISK = frozenset({"fill", "freeze"})
ENDING = frozenset({"kill", "restart", "rewind"})
"""What starts a process anew, so that its memory says nothing of hours."""

_LONG = 0.2


@dataclass(frozen=True, order=True)
class Act:
    """One thing that is done.

    Args:
        at: Seconds after the beginning.
        kind: One of `KINDS`.
        who: The part that it is done to; "disk" for all of them.
        lasts: Seconds until it is undone.
        back: For a rewind: how many steps.
    """

    at: float
    kind: str
    who: str
    lasts: float = 0.0
    back: int = 0


@dataclass(frozen=True)
class Terms:
    """What a schedule is made for.

    Args:
        seconds: Its length. Near its end nothing is done any more.
        gap: Mean seconds between two acts.
        ttl: Seconds of silence after which an explorer counts as dead; some disturbances last longer.
        explorers: Their names.
        spared: Parts that are not started anew after `spared_from`, to see their memory.
        spared_from: Seconds after the beginning.
        kinds: What this machine allows.
    """

    seconds: float
    gap: float
    ttl: float
    explorers: Sequence[str]
    spared: Collection[str] = ()
    spared_from: float = float("inf")
    kinds: Collection[str] = tuple(KINDS)


def schedule(seed: int, terms: Terms) -> list[Act]:
    """Return the acts of a run, in order; each kind comes at least once if there is time."""
    chance = random.Random(seed)  # repeatable, not secret
    kinds = sorted(set(terms.kinds))
    first = chance.sample(kinds, len(kinds))
    free: dict[str, float] = {}
    acts, at = [], 1.0
    last = terms.seconds - max(REST, terms.seconds / 10)
    while (at := at + terms.gap * chance.uniform(0.5, 1.5)) < last:
        kind = first[-1] if first else chance.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        act = _act(chance, terms, kind, at, last - at)
        if free.get(act.who, 0.0) <= at:
            free[act.who] = at + act.lasts + REST
            acts.append(act)
            first = first[:-1]
    return acts


def _act(chance: random.Random, terms: Terms, kind: str, at: float, most: float) -> Act:
    if kind in ON_DISK:
        return Act(at, kind, "disk", min(chance.uniform(1.0, terms.ttl / 3), most))
    if kind == "rewind":
        return Act(at, kind, TRAINER, back=chance.randint(1, 2))
    who = chance.choice([part for part in _parts(terms) if _may(terms, part, kind, at)])
    if kind in ENDING:
        return Act(at, kind, who)
    lasts = chance.uniform(1.2, 1.5) if chance.random() < _LONG else chance.uniform(0.05, 0.5)
    return Act(at, kind, who, min(lasts * terms.ttl, most))


def _parts(terms: Terms) -> list[str]:
    return [TRAINER, *DAEMONS, *terms.explorers]


def _may(terms: Terms, part: str, kind: str, at: float) -> bool:
    return not (kind in ENDING and part in terms.spared and at >= terms.spared_from)
