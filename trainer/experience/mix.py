"""Experiences mixed with examples of an SFT data set."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from syncd.errors import ConfigError
from trainer.experience.batch import Batch, Strategy
from trainer.experience.cursor import fields_of
from trainer.experience.sft import Examples


class Mix:
    """Adds SFT examples to each batch of another strategy.

    Args:
        strategy: Where experiences come from.
        examples: The data set.
        ratio: Examples as a share of the whole batch.

    Raises:
        ConfigError: The ratio is out of range.
    """

    KIND = "mix"

    def __init__(self, strategy: Strategy, examples: Examples, *, ratio: float) -> None:
        if not 0 < ratio < 1:
            raise ConfigError(f"ratio {ratio} of SFT examples is not between 0 and 1")
        self._strategy, self._examples, self._ratio = strategy, examples, ratio

    def sample(self, step: int, *, generation: int) -> Batch | None:
        """Return the other strategy's batch with examples, None while it has none."""
        batch = self._strategy.sample(step, generation=generation)
        if batch is None:
            return None
        count = round(len(batch.firsts) * self._ratio / (1 - self._ratio))
        return replace(batch, examples=self._examples.take(count))

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {
            "kind": self.KIND,
            "strategy": self._strategy.state_dict(),
            "examples": self._examples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from both states."""
        fields = fields_of(state, self.KIND)
        self._examples.load_state_dict(fields.record("examples").document)
        self._strategy.load_state_dict(fields.record("strategy").document)

    def commit(self, state: Mapping[str, Any]) -> int:
        """Let go of the batches that the other strategy's saved state needs no more."""
        return self._strategy.commit(fields_of(state, self.KIND).record("strategy").document)

    def metrics(self) -> dict[str, float]:
        """Return those of the other strategy."""
        return self._strategy.metrics()
