"""One batch on its way through a step of training."""

from collections import Counter
from dataclasses import dataclass

from syncd.errors import UsageError
from trainer.config.algorithms import SFT
from trainer.config.model import AlgorithmSection
from trainer.config.options import correction
from trainer.engines.verl.figures import Figures
from trainer.engines.verl.rows import Part, Row, example_rows, rollout_rows, split
from trainer.experience.batch import Batch

_POLICY = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "rollout/logprob_diff_mean")


@dataclass(frozen=True, slots=True)
class Step:
    """A batch as rows, the updates of one pass over it, and its figures so far."""

    batch: Batch
    rollouts: list[Row]
    examples: list[Row]
    parts: list[Part]
    figures: Figures

    @property
    def rows(self) -> list[Row]:
        """Return rollouts and examples."""
        return [*self.rollouts, *self.examples]

    @property
    def horizon(self) -> int:
        """Return the length of the longest response of a rollout, over all its segments."""
        lengths = Counter[int | None]()
        for row in self.rollouts:
            lengths[row.rollout] += len(row.mask)
        return max(lengths.values(), default=1)


def prepare(algorithm: AlgorithmSection, batch: Batch, *, mixed: bool) -> Step:
    """Return the step of a batch.

    Args:
        algorithm: What is learnt, resolved.
        batch: The batch.
        mixed: Whether examples are expected besides rollouts, so that their figures are there in each step.

    Raises:
        UsageError: There is nothing in it.
    """
    only_examples = algorithm.name == SFT
    rollouts = [] if only_examples else rollout_rows(batch)
    examples = example_rows(batch.examples)
    if not rollouts and not examples:
        raise UsageError("a batch with nothing to learn from")
    means = () if only_examples else _POLICY
    if not only_examples and correction(algorithm.options) is not None:
        means = (*means, "rollout/is_weight_mean")
    if only_examples or mixed or examples:
        means = (*means, "sft/loss")
    tops = () if only_examples else ("rollout/logprob_diff_max",)
    figures = Figures(sums=dict.fromkeys(means, 0.0), tops=dict.fromkeys(tops, 0.0))
    return Step(batch, rollouts, examples, split(rollouts, examples, algorithm.mini_batches), figures)
