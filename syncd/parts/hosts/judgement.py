"""What becomes of a host that fails, is slow, or is not needed: pure decisions.

Blame comes late and is forgotten with the version: what is moved is read from the file system once more, and at the
beginning all hosts look slow. With quick blame, hosts on a busy network blame each other, and each reads everything.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

STRIKES = 3  # time-outs in a row after which a host is asked nothing more for this version
SLACK = 1.0  # seconds, and a tenth of the time until now, that a host may be later than most
WINDOW = 3.0  # seconds of a host's answers by which its speed is judged: what it did long ago says nothing

SETTLE = 2.0
"""Seconds for which hosts are watched, once most have delivered everything, before one is called late."""

STUCK = 30.0
"""Seconds in which nothing came, from the file system or another host, after which a host reads what is missing."""

ABSENT = 3.0  # seconds that a host may take to begin with a version
BUDGET = 1.25  # how much of its own share a host may read from the file system before it says so
ALONE = 3.0  # seconds of reading alone below which other hosts make nothing faster

Failure = Literal["refused", "wrong", "denied", "late", "absent", "busy", "lost"]
"""refused: nobody listens. wrong: the bytes do not match their digest. denied: it takes another token. late: no
answer in time. absent: it does not know the version. busy: the piece is on its way to it. lost: the connection
ended."""

Fate = Literal["remove", "move", "wait"]
"""remove: it is asked nothing more for this version. move: the next host is asked for this piece. wait: it is asked
again."""


def fate_of(failure: Failure, strikes: int, absent_for: float) -> Fate:
    """Return what follows from a failure.

    Args:
        strikes: Time-outs and lost connections in a row, this one among them.
        absent_for: Seconds for which it has said that it does not know the version.
    """
    if failure in ("refused", "wrong", "denied"):
        return "remove"
    if failure == "absent":
        return "remove" if absent_for >= ABSENT else "wait"
    if failure == "busy":
        return "wait"
    return "remove" if strikes >= STRIKES else "move"


@dataclass(frozen=True, slots=True)
class HostProgress:
    """How far one host is with what is asked of it."""

    left: int  # bytes that it has yet to deliver
    recent: int  # bytes that it has delivered in the last `WINDOW` seconds, and since most have delivered everything


def have_most_delivered(hosts: Iterable[HostProgress], *, has_share: bool) -> bool:
    """Return whether most hosts have nothing left to deliver: nobody is late before that.

    Args:
        has_share: Whether this host reads a share too, which it has done.
    """
    left = [*([0] if has_share else []), *(host.left for host in hosts)]
    return bool(left) and statistics.median_low(left) == 0


def late_hosts(
    hosts: Mapping[str, HostProgress],
    elapsed: float,
    calm_for: float,
    largest: int,
    *,
    is_coarse: bool = False,
    origin: float | None = None,
) -> dict[str, int]:
    """Return what late hosts may keep of what they have yet to deliver, in bytes; the rest is asked elsewhere.

    A host is judged by what it does once the others no longer read from the file system: before, they shared that.

    Args:
        elapsed: Seconds since this host began with the version.
        calm_for: Seconds since most hosts have delivered everything.
        largest: Bytes of the largest piece.
        is_coarse: Whether large files are one piece each, which comes long after the others.
        origin: Bytes a second that the file system gives all hosts together, as far as this host can tell. While the
            hosts that are left bring half of that, the file system is what is slow, and nobody else would be faster.
    """
    if calm_for < SETTLE:
        return {}
    brought = sum(host.recent for host in hosts.values() if host.left) / min(calm_for, WINDOW)
    if origin is not None and brought >= origin / 2:
        return {}
    window, limit = min(calm_for, WINDOW), SLACK + (1.0 if is_coarse else 0.1) * elapsed
    keeps = dict[str, int]()
    for name, host in hosts.items():
        speed = max(host.recent, largest / 4) / window
        if host.left > limit * speed:
            keeps[name] = int(limit * speed)
    return keeps


def is_stuck(silent_for: float, *, is_coarse: bool = False) -> bool:
    """Return whether nothing has come from anywhere for so long that a host reads all that is missing itself."""
    return silent_for >= STUCK * (10 if is_coarse else 1)


def is_quick_alone(size: int, rate: float | None) -> bool:
    """Return whether reading everything from the file system takes no longer than other hosts save.

    Args:
        rate: Bytes a second that this host was given by the file system while all hosts read; None if unknown.
    """
    return rate is not None and size < ALONE * rate


def budget_of(share: int) -> int:
    """Return the bytes that a host may read from the file system without saying so."""
    return int(share * BUDGET)
