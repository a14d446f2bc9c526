"""The batch of one training step, and the interface of sample strategies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from syncd.experience.model import Experience
from trainer.experience.cursor import Origin
from trainer.experience.limits import Limits
from trainer.experience.sft import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one training step; all fields but the examples are of equal length, members of a group in a row.

    A sample is a rollout: its segments are rows one after the other, with one group, weight and age.
    """

    experiences: tuple[Experience, ...]  # the rollouts' segments; most rollouts have one
    groups: tuple[int, ...]  # the number of the group of each, from 0
    # What each counts in the loss: 1 unless its rollout is down-weighted for its age.
    weights: tuple[float, ...]
    # The age of each one's rollout in versions; None for one that is ahead of the trainer.
    ages: tuple[int | None, ...]
    origins: tuple[Origin, ...]  # where each is stored
    examples: tuple[Example, ...] = ()  # examples of an SFT data set that are mixed in

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Return the number of the rollout of each row, from 0."""
        return tuple(accumulate((segment.segment == 0 for segment in self.experiences), initial=-1))[1:]

    @property
    def firsts(self) -> tuple[Experience, ...]:
        """Return the first segment of each rollout, for values that a rollout has once."""
        return tuple(segment for segment in self.experiences if segment.segment == 0)

    def over_rollouts(self, counts: Sequence[int]) -> list[int]:
        sums = [0] * len(self.firsts)
        for rollout, count in zip(self.rollouts, counts, strict=True):
            sums[rollout] += count
        return sums


class SampleStrategy(ABC):
    """Chooses what is trained on. Its state and the present files determine what it returns.

    Other packages register theirs under the entry point group `trainer.sample_strategies`, as a function that takes
    the configuration and the job and returns one.
    """

    @property
    def over(self) -> str:
        """Return why no further samples will come, whatever explorers do; empty while they may."""
        return ""

    def limit(self, limits: Limits) -> None:  # noqa: B027 - a strategy may take what the engine refuses
        """Return only rows that the model can take from now on; called before a state is loaded."""

    @abstractmethod
    def sample(self, step: int, *, generation: int) -> Batch | None:
        """Return the samples for the step after `step`, None if there are not enough yet.

        Args:
            step: The trainer's current step, from which ages are counted.
            generation: The generation of the trainer's current version.
        """

    def preparing(self) -> AbstractContextManager[None]:
        """Prepare the next batch in a thread while the body trains; what `sample` returns does not depend on it."""
        return nullcontext()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON; it goes into trainer_meta.json."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""

    def commit(self, state: Mapping[str, Any]) -> int:  # noqa: ARG002 - of strategies that keep files
        """Release the batches that `state`, which is durably saved, does not need; return how many."""
        return 0

    def metrics(self) -> dict[str, float]:
        return {}
