"""What becomes of a host that fails, is slow, or is not needed: pure decisions.

Blame comes late and is forgotten with the version: what is moved may be read from the file system once more, and at
the beginning all hosts look slow. With quick blame, hosts on a busy network blame each other, and each reads
everything.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

STRIKES = 3  # time-outs in a row after which a host is asked nothing more for this version
SLACK = 1.0  # seconds, and a quarter of the time until now, that a host may yet take when all others are done
SETTLE = 0.5  # seconds beyond those in which what is left should have come, before a host is called late
WINDOW = 10.0  # seconds of answers by which hosts are judged at most: what they did long ago says nothing

STUCK = 30.0
"""Seconds in which nothing came, from the file system or another host, after which a host reads what is missing."""

ABSENT = 3.0  # seconds that a host may take to begin with a version
BUDGET = 1.25  # how much of its own share a host may read from the file system before it says so
ALONE = 3.0  # seconds of reading alone below which other hosts make nothing faster

LEAST_BYTES, LEAST_SECONDS = 64 << 20, 1.0
"""What a host has read at least before that measures the file system: less comes out of caches, or in a burst."""

RATE_LASTS = 3600.0  # seconds until a rate is forgotten: with early copies nothing may measure it again

Failure = Literal["refused", "wrong", "denied", "late", "absent", "busy", "lost"]
"""refused: nobody listens. wrong: the bytes do not match their digest. denied: it takes another token. late: no
answer in time. absent: it does not know the version. busy: the piece is on its way to it, or too many ask it. lost:
the connection ended."""

Fate = Literal["remove", "move", "wait"]
"""remove: it is asked nothing more for this version. move: the next host is asked for this piece. wait: it is asked
again."""


def fate_of(failure: Failure, strikes: int, begun_for: float) -> Fate:
    """Return what follows from a failure.

    Args:
        strikes: Time-outs and lost connections in a row, this one among them.
        begun_for: Seconds since this host began with the version.
    """
    if failure in ("refused", "wrong", "denied"):
        return "remove"
    if failure == "absent":
        return "remove" if begun_for >= ABSENT else "wait"
    if failure == "busy":
        return "wait"
    return "remove" if strikes >= STRIKES else "move"


@dataclass(frozen=True, slots=True)
class HostProgress:
    """How far one host is with what is asked of it."""

    left: int  # bytes that it has yet to deliver
    recent: int  # bytes that it has delivered while it was watched
    asked_for: float  # seconds since it was last given something to deliver


def have_most_delivered(hosts: Iterable[HostProgress]) -> bool:
    """Return whether most hosts have nothing left to deliver: nobody is late before that."""
    left = [host.left for host in hosts]
    return bool(left) and statistics.median_low(left) == 0


def watched_for(left: int, size: int, elapsed: float) -> float:
    """Return the last seconds by which hosts are judged: as many as what is left takes at the rate until now.

    Args:
        left: Bytes that all hosts have yet to deliver, of `size`.
        elapsed: Seconds since this host began with the version.
    """
    return min(SETTLE + elapsed * left / max(size - left, 1), WINDOW)


def late_hosts(
    hosts: Mapping[str, HostProgress], size: int, elapsed: float, *, is_coarse: bool = False
) -> dict[str, int]:
    """Return what late hosts may keep of what they have yet to deliver, in bytes; the rest is asked elsewhere.

    While bytes come half as fast as they did until now, the file system is what is slow, or a host that delivers:
    nobody else would be faster. What is left is small when that ends, and so is what a wrong verdict costs.

    Args:
        hosts: All that read a share; this one among them, or its reading would look like silence of the others.
        size: Bytes of all pieces.
        elapsed: Seconds since this host began with the version.
        is_coarse: Whether large files are one piece each, which comes long after the others.
    """
    left = sum(host.left for host in hosts.values())
    watched = watched_for(left, size, elapsed)
    if sum(host.recent for host in hosts.values()) * elapsed >= (size - left) * watched / 2:
        return {}
    due = watched - SETTLE
    limit = max(SLACK + (1.0 if is_coarse else 0.25) * elapsed, due)
    return {
        name: int(host.recent * due / watched)
        for name, host in hosts.items()
        if host.left * watched > host.recent * limit and host.asked_for >= limit
    }


def is_stuck(silent_for: float, *, is_coarse: bool = False) -> bool:
    """Return whether nothing has come from anywhere for so long that a host reads all that is missing itself."""
    return silent_for >= STUCK * (10 if is_coarse else 1)


def is_quick_alone(size: int, rate: float | None) -> bool:
    """Return whether reading everything from the file system takes no longer than other hosts save.

    Args:
        rate: Bytes a second that this host was given by the file system while all hosts read; None if unknown.
    """
    return rate is not None and size < ALONE * rate


class OriginRate:
    """The bytes a second that this host was last given by the file system while all hosts read.

    Args:
        now: Returns seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._noted_at = now, 0.0
        self._rate: float | None = None

    def note(self, size: int, seconds: float) -> None:
        """Note how long bytes took, if they say anything."""
        if size >= LEAST_BYTES and seconds >= LEAST_SECONDS:
            self._rate, self._noted_at = size / seconds, self._now()

    @property
    def known(self) -> float | None:
        """The rate, None if it is not known, or not known any more."""
        return self._rate if self._now() - self._noted_at < RATE_LASTS else None


def budget_of(share: int) -> int:
    """Return the bytes that a host may read from the file system without saying so."""
    return int(share * BUDGET)
