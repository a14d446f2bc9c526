"""What a trainer says while it waits for samples: what for, since when and from where, at once and then calmly."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncd.protocol.disk import Clock
from trainer.reporting.figures import span

QUIET = 30.0
"""Seconds of a wait between two steps before anything is said of it; the first wait of a start is told at once."""

EVERY = 60.0
"""Seconds between two lines about one wait."""


class Waiting:
    """Knows since when samples are awaited, and when to say so.

    Args:
        clock: This host's clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._due = 0.0
        self._has_begun = False
        self.since = 0.0  # seconds since the epoch, for people

    @property
    def seconds(self) -> float | None:
        """Return for how long samples have been awaited, None where they are not."""
        return None if self._since is None else self._clock.monotonic() - self._since

    def begin(self) -> None:
        """Note that there are no samples now."""
        if self._since is not None:
            return
        self._since, self.since = self._clock.monotonic(), self._clock.time()
        self._due = self._since + (QUIET if self._has_begun else 0.0)
        self._has_begun = True

    def end(self) -> None:
        """Note that there are samples."""
        self._since, self._has_begun = None, True

    def is_due(self) -> bool:
        """Say whether a line about the wait is due now; the next one is `EVERY` seconds later."""
        now = self._clock.monotonic()
        if self._since is None or now < self._due:
            return False
        self._due = now + EVERY
        return True


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, for people.

    Args:
        path: Where samples come from.
        since: Since when they are awaited, in seconds since the epoch.
        seconds: For how long that is.
        whole: Whole groups that are there.
        needed: Groups that a step takes.
        living: Explorers that live; None where that cannot be read.
        rejected: Batches that this start has set aside.
        file: The job's file, for explorers that are to be started.
    """

    path: str
    since: float
    seconds: float
    whole: int
    needed: int
    living: int | None
    rejected: int
    file: str

    def text(self) -> str:
        """Return one line."""
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        there = f"{self.whole} of {self.needed} groups are there"
        parts = [f"waiting for experiences in {self.path} since {since} ({span(self.seconds)}): {there}"]
        if self.rejected:
            parts.append(f"{self.rejected} batches were set aside in {self.path}/.rejected")
        parts.append(self._explorers())
        return "; ".join(parts)

    def _explorers(self) -> str:
        if self.living is None:
            return "explorers cannot be seen"
        if self.living:
            return f"{self.living} explorer{'s' if self.living > 1 else ''} alive"
        return f"no explorer is alive: explorer run {self.file or 'CONFIG'}"


def document(path: str, since: float) -> Mapping[str, Any]:
    """Return what the trainer's presence says of a wait."""
    return {"for": "experiences", "path": path, "since": since}
