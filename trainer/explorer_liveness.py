"""Who is there to make experiences, and whether more can be expected."""

from syncd.client.client import Client
from syncd.protocol.disk import Clock
from syncd.protocol.presence import RunningStatus

_LOOK = 1.0
"""Seconds between two looks: each one reads a file an explorer."""


class Audience:
    """Watches the explorers of a job.

    Args:
        sync: The trainer's connection to the job.
        clock: Time.
        grace: Seconds that all of them must have been gone before they count as gone for good.
    """

    def __init__(self, sync: Client, clock: Clock, grace: float) -> None:
        self._sync, self._clock, self._grace = sync, clock, grace
        self._looked = float("-inf")
        self._seen = False
        self._gone_since: float | None = None
        self.living = 0

    def look(self) -> bool:
        """Say whether all explorers that were there in this run have left."""
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._count(now)
        return self._gone_since is not None and now - self._gone_since >= self._grace

    def _count(self, now: float) -> None:
        counts = self._sync.explorers.counts()
        self.living = counts[RunningStatus.RUNNING] + counts[RunningStatus.REQUIRE_SYNC]
        self._seen = self._seen or self.living > 0
        if self.living or not self._seen:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
