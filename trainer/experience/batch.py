"""What a sample strategy returns, and the one interface of all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from syncd.experience.model import Experience
from trainer.experience.cursor import Origin
from trainer.experience.sft import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one training step; all fields but the examples are of equal length, members of a group in a row.

    A sample is a rollout: its segments are rows one after the other, with one group, weight and age.

    Args:
        experiences: The rollouts' segments; most rollouts have one.
        groups: The number of the group of each, from 0.
        weights: What each counts in the loss: 1 unless its rollout is down-weighted for its age.
        ages: The age of each one's rollout in versions; None for one that is ahead of the trainer.
        origins: Where each is stored.
        examples: Examples of an SFT data set that are mixed in.
    """

    experiences: tuple[Experience, ...]
    groups: tuple[int, ...]
    weights: tuple[float, ...]
    ages: tuple[int | None, ...]
    origins: tuple[Origin, ...]
    examples: tuple[Example, ...] = ()

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Return the number of the rollout of each row, from 0."""
        return tuple(accumulate((one.segment == 0 for one in self.experiences), initial=-1))[1:]

    @property
    def firsts(self) -> tuple[Experience, ...]:
        """Return the first segment of each rollout: for what is said once a rollout."""
        return tuple(one for one in self.experiences if one.segment == 0)


class Strategy(Protocol):
    """Chooses what is trained on. Given its state and the files that are there, what it returns is determined."""

    def sample(self, step: int, *, generation: int) -> Batch | None:
        """Return the samples for the step after `step`, None while there are not enough.

        Args:
            step: The trainer's present step, by which ages are reckoned.
            generation: The generation of the version that the trainer continues.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON, for trainer_meta.json."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            CorruptDataError: It is not a state of this strategy.
        """

    def commit(self, state: Mapping[str, Any]) -> int:
        """Let go of the batches that `state` needs no more, once it is durably saved; return how many."""

    def metrics(self) -> dict[str, float]:
        """Return what is worth plotting, by name."""
