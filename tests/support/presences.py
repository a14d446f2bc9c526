"""Presences of modules that only tests play."""

from typing import Any

from syncd.protocol.disk import Clock, Disk
from syncd.protocol.presence import HEARTBEAT, Presence, Publisher


class BeatingPublisher(Publisher):
    """A publisher that knows when its next heartbeat is due."""

    def __init__(self, disk: Disk, clock: Clock, directory: str, presence: Presence) -> None:
        super().__init__(disk, clock, directory, presence)
        self._at = clock.monotonic()

    def update(self, **changes: Any) -> Presence:
        """Change fields and publish them with a new beat."""
        now = self._clock.monotonic()
        changed = super().update(**changes)
        self._at = now
        return changed

    def beat(self) -> None:
        """Publish a heartbeat if one is due."""
        if self._clock.monotonic() - self._at >= HEARTBEAT:
            self.update()
