"""What the journals and logs of a soak say when it is over: pure functions over their lines."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Disturbance:
    """A time in which a part could not do what it wanted.

    Args:
        kind: As in `schedule.KINDS`.
        who: The part.
        began: On this host's clock.
        ended: The same.
    """

    kind: str
    who: str
    began: float
    ended: float


def excused(line: Mapping, disturbances: Iterable[Disturbance], ttl: float) -> bool:
    """Say whether a load may have failed: cut off in its midst, or silent for so long that its lease was void.

    Args:
        line: A line of an explorer's journal.
        disturbances: What was done to this explorer.
        ttl: Seconds of silence after which it counts as dead.
    """

    def explains(done: Disturbance) -> bool:
        if done.kind == "cut" and done.began <= line["ended"] and done.ended >= line["began"] - 1.0:
            return True
        long = done.ended - done.began >= ttl / 2
        return long and done.began <= line["ended"] and done.ended >= line["began"] - ttl

    return any(explains(done) for done in disturbances)


@dataclass(frozen=True)
class Loads:
    """What an explorer has read, and what it must not have met."""

    loads: int
    bytes: int
    excused: int
    wrong: list[str]


def loads_of(name: str, lines: Sequence[Mapping], disturbances: Sequence[Disturbance], ttl: float) -> Loads:
    """Judge the journal of an explorer: each load ends well, and it never goes back within one life."""
    good = [line for line in lines if line["event"] == "runs"]
    bad = [line for line in lines if line["event"] != "runs"]
    unexplained = [line for line in bad if not excused(line, disturbances, ttl)]
    wrong = [f"{name}: {line['event']} {line['pair']}: {line['reason']}" for line in unexplained]
    return Loads(len(good), sum(line["bytes"] for line in good), len(bad) - len(unexplained), wrong)


def leaders(logs: Mapping[str, Sequence[Mapping]]) -> list[str]:
    """Return what is wrong with who led, by the logs of all daemons.

    Args:
        logs: Events by the daemon's name, in order; one log goes on over all its starts.
    """
    took, published = defaultdict(list), defaultdict(list)
    for name, events in logs.items():
        for event in events:
            if event.get("event") == "leadership_acquired":
                took[event["term"]].append(name)
            elif event.get("event") == "version_published":
                published[event["generation"], event["step"]].append(name)
    twice = [f"term {term} was led by {names}" for term, names in took.items() if len(names) > 1]
    return twice + [f"version {pair} was published by {n}" for pair, n in published.items() if len(n) > 1]
