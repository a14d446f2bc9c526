"""What a soak is."""

from dataclasses import dataclass

from soak.schedule import DAEMONS


@dataclass(frozen=True)
class Plan:
    """What a soak is.

    Args:
        seconds: How long the parts are disturbed.
        seed: Of the schedule.
        gap: Mean seconds between two disturbances.
        explorers: How many.
        pause: Seconds between two steps of the trainer.
        ttl: Of the explorers.
        takeover: Of the daemons.
        sample: Seconds between two samples.
        slow: Seconds for which every fourth explorer reads one version.
    """

    seconds: float
    seed: int = 1
    gap: float = 6.0
    explorers: int = 8
    pause: float = 1.0
    ttl: float = 20.0
    takeover: float = 5.0
    sample: float = 5.0
    slow: float = 5.0

    @property
    def names(self) -> list[str]:
        """Return the explorers' names."""
        return [f"e{number}" for number in range(self.explorers)]

    @property
    def spared(self) -> tuple[str, ...]:
        """Return the parts that are not started anew in the last two thirds."""
        return (DAEMONS[0], *self.names[:3])
