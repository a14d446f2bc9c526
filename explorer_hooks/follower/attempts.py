"""Which versions are not tried now: those that were given up, and those that are tried again a little later."""

from syncd.protocol.disk import Clock
from syncd.protocol.version import Pair

_LONGEST = 60.0
_MISSED = 0.25
"""Seconds until a step that was not there is looked for again: its successor is published within that time."""

_REMEMBERED = 256


class Attempts:
    """What has become of versions that could not be loaded.

    Args:
        clock: This host's clock.
        retries: How often a version is tried again.
        backoff: Seconds before the first further attempt; twice as long before each one after it.
    """

    def __init__(self, clock: Clock, retries: int, backoff: float) -> None:
        self._clock, self._retries, self._backoff = clock, retries, backoff
        self._failures: dict[Pair, int] = {}
        self._resting: dict[Pair, float] = {}
        self._given_up: dict[Pair, None] = {}

    def fail(self, pair: Pair) -> bool:
        """Note a failure, and say whether the version is tried again."""
        failures = self._failures[pair] = self._failures.get(pair, 0) + 1
        if failures > self._retries:
            self.give_up(pair)
            return False
        self._resting[pair] = self._clock.monotonic() + min(self._backoff * 2 ** (failures - 1), _LONGEST)
        return True

    def miss(self, pair: Pair) -> None:
        """Note that a version was not there."""
        self._resting[pair] = self._clock.monotonic() + _MISSED

    def give_up(self, pair: Pair) -> None:
        """Note that a version is never tried again."""
        self._failures.pop(pair, None)
        self._resting.pop(pair, None)
        self._given_up[pair] = None
        if len(self._given_up) > _REMEMBERED:
            del self._given_up[next(iter(self._given_up))]

    def succeed(self) -> None:
        """Forget failures: another version was loaded."""
        self._failures.clear()
        self._resting.clear()

    @property
    def given_up(self) -> frozenset[Pair]:
        """Return the versions that are never tried again."""
        return frozenset(self._given_up)

    @property
    def resting(self) -> frozenset[Pair]:
        """Return the versions that are tried again later."""
        now = self._clock.monotonic()
        self._resting = {pair: until for pair, until in self._resting.items() if until > now}
        return frozenset(self._resting)
