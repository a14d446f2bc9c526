"""The ages of experiences in versions, and the weights that follow from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from syncd.errors import ConfigError
from syncd.experience.model import Experience
from syncd.protocol.version import Pair


@dataclass(frozen=True, slots=True)
class Staleness:
    """What happens to experiences that are older than a number of versions."""

    # The age in versions up to which an experience counts in full; None for no bound.
    bound: int | None = None
    # `drop` the group of an older one, or give it a lower `weight`.
    beyond: Literal["drop", "weight"] = "drop"
    decay: float = 0.5  # by this an older one's weight is multiplied for each version beyond the bound
    interval: int = 1  # steps between two versions

    def __post_init__(self) -> None:
        if (self.bound is not None and self.bound < 0) or self.interval < 1 or not 0 < self.decay < 1:
            raise ConfigError(
                f"staleness out of range: {self}", hint="bound >= 0, interval >= 1, 0 < decay < 1"
            )

    def age(self, experience: Experience, now: Pair) -> int | None:
        """Return the age in versions: that of the oldest one that had a part in it; None where one is ahead of `now`.

        Versions are ordered as pairs of generation and step. What is above the trainer's own pair is ahead: the
        trainer has gone back without a new generation, or belongs to an older line.
        """
        ages = [self._age(version, now) for version in experience.versions]
        return None if None in ages else max(age for age in ages if age is not None)

    def oldest(self, experiences: Iterable[Experience], now: Pair) -> int | None:
        """Return the age of a rollout of several segments: that of its oldest one; None where one has none."""
        ages = [self.age(experience, now) for experience in experiences]
        return None if None in ages else max(age for age in ages if age is not None)

    def _age(self, version: Pair, now: Pair) -> int | None:
        """Return the versions between two at least: to a common ancestor and from there, and one for each rewind.

        Steps of an earlier generation above the trainer's own were abandoned: they are not from the future. As far as
        they are above it, so many versions lie between them and what both go back to.
        """
        if version > now:
            return None
        apart = abs(now[1] // self.interval - version[1] // self.interval)
        return apart + now[0] - version[0]

    def weight(self, age: int | None) -> float:
        """Return what an experience of an age counts; nothing beyond the bound unless it is down-weighted."""
        if self.bound is None:
            return 1.0
        if age is None:
            return 0.0
        over = age - self.bound
        if over <= 0:
            return 1.0
        return 0.0 if self.beyond == "drop" else float(self.decay**over)

    def is_stale(self, experiences: Iterable[Experience], now: Pair) -> bool:
        return any(self.weight(self.age(experience, now)) == 0.0 for experience in experiences)
