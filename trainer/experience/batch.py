"""What a sample strategy returns, and the one interface of all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from syncd.experience.model import Experience
from trainer.experience.cursor import Origin
from trainer.experience.limits import Limits
from trainer.experience.sft import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one training step; all fields but the examples are of equal length, members of a group in a row.

    Args:
        experiences: The rollouts.
        groups: The number of the group of each, from 0.
        weights: What each counts in the loss: 1 unless it is down-weighted for its age.
        ages: The age of each in versions; None for one of another generation.
        origins: Where each is stored.
        examples: Examples of an SFT data set that are mixed in.
    """

    experiences: tuple[Experience, ...]
    groups: tuple[int, ...]
    weights: tuple[float, ...]
    ages: tuple[int | None, ...]
    origins: tuple[Origin, ...]
    examples: tuple[Example, ...] = ()


class Strategy(Protocol):
    """Chooses what is trained on. Given its state and the files that are there, what it returns is determined."""

    def limit(self, limits: Limits) -> None:
        """Let nothing through from now on that the model cannot take; called before a state is loaded.

        Raises:
            ConfigError: A data set of the user's own holds such a row.
        """

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
