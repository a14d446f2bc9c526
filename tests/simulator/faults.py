"""What goes wrong in one schedule: drawn from its seed, struck at single system calls."""

import errno
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from simulator.host import Caching
from simulator.tree import failure

LOCAL = Caching()
NFS = Caching(names=10.0, attributes=3.0)


class Fault(StrEnum):
    """One thing that can happen at a system call."""

    CRASH = "crash"
    POWER = "power cut"
    PAUSE = "pause"
    STALL = "stall"
    ERROR = "error"
    LOST = "lost answer"
    OUTAGE = "outage"


_READS = frozenset({"read", "stat", "list", "refresh", "statvfs"})
_READ_ERRORS = (errno.ESTALE, errno.ETIMEDOUT, errno.EIO)
_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_LOST_ERRORS = (errno.ETIMEDOUT, errno.EIO)
# A call that is sent again because its answer was lost meets what it did the first time.
_RESENT = {"mkdir": errno.EEXIST, "create": errno.EEXIST}

_WEIGHTS = {
    Fault.CRASH: 6.0,
    Fault.POWER: 0.4,
    Fault.PAUSE: 4.0,
    Fault.STALL: 6.0,
    Fault.ERROR: 5.0,
    Fault.LOST: 3.0,
    Fault.OUTAGE: 1.0,
}

_COARSE = 0.4


@dataclass(frozen=True, slots=True)
class Profile:
    """The weather of one schedule.

    Args:
        caching: What hosts remember.
        coarse: Directories show changes by a coarse time stamp.
        gap: Mean number of calls between two faults.
        weights: How often each kind of fault is chosen.
        latency: Mean seconds of one system call.
        trouble: Seconds after which no more faults happen.
    """

    caching: Caching
    coarse: bool
    gap: float
    weights: tuple[float, ...]
    latency: float
    trouble: float

    @staticmethod
    def draw(random: Random) -> "Profile":
        """Draw the weather of a schedule; some kinds of fault may be missing from it altogether."""
        caching = random.choice((LOCAL, NFS, NFS))
        return Profile(
            caching=caching,
            coarse=bool(caching.names) and random.random() < _COARSE,
            gap=random.choice((15.0, 40.0, 120.0, 400.0)),
            weights=tuple(weight * random.choice((0.0, 0.3, 1.0, 3.0)) for weight in _WEIGHTS.values()),
            latency=random.choice((0.0005, 0.003, 0.03)),
            trouble=random.uniform(10.0, 70.0),
        )


class Weather:
    """Strikes calls as a profile says."""

    def __init__(self, profile: Profile, random: Random) -> None:
        self._profile, self._random = profile, random
        self._left = self._next()

    def calls(self) -> bool:
        """Count one call, and say whether it is struck."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._next()
        return any(self._profile.weights)

    def kind(self) -> Fault:
        """Return what strikes."""
        return self._random.choices(tuple(_WEIGHTS), self._profile.weights)[0]

    def error(self, call: str, path: str) -> OSError:
        """Return an error with which a call may fail."""
        return failure(self._random.choice(_READ_ERRORS if call in _READS else _WRITE_ERRORS), path)

    def lost(self, call: str, path: str) -> OSError | None:
        """Return what a call may report although it was done, None for one that does nothing."""
        if call in _READS or call in ("write", "fsync", "syncdir"):
            return None
        resent = _RESENT.get(call, errno.ENOENT)
        return failure(self._random.choice((*_LOST_ERRORS, resent)), path)

    def _next(self) -> int:
        return 1 + int(self._random.expovariate(1.0 / self._profile.gap))
