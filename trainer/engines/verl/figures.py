"""Metrics of one step: gathered pass by pass on each rank, then combined over all ranks."""

import statistics
from dataclasses import dataclass, field

import torch

from syncd.transports.ranks import Ranks
from trainer.engines.base import Metrics
from trainer.experience.batch import Batch


@dataclass
class StepMetrics:
    """Sums, weighted means and maxima by name.

    Args:
        sums: Sums, and for means the weighted sums. Names given at the start are 0 until something is added, so that
            all steps have the same keys.
        weights: For means, the sums of the weights.
        tops: Maxima.
    """

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    tops: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add to a sum over passes and ranks."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str, value: float, weight: float) -> None:
        """Add to a mean over passes and ranks: `value` is the mean of `weight` tokens."""
        self.add(name, value * weight)
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def top(self, name: str, value: float) -> None:
        """Raise a maximum."""
        self.tops[name] = max(self.tops.get(name, value), value)

    def drop(self, *names: str) -> None:
        """Remove figures that this step does not measure."""
        for name in names:
            for kept in (self.sums, self.weights, self.tops):
                kept.pop(name, None)

    def over(self, ranks: Ranks) -> Metrics:
        """Return the metrics over all ranks, the same on all of them."""
        whole = StepMetrics()
        for one in ranks.gather(self):
            for name, value in one.sums.items():
                whole.add(name, value)
            for name, weight in one.weights.items():
                whole.weights[name] = whole.weights.get(name, 0.0) + weight
            for name, value in one.tops.items():
                whole.top(name, value)
        means = {name: value / (whole.weights.get(name) or 1.0) for name, value in whole.sums.items()}
        return means | whole.tops


def measure_difference(
    figures: StepMetrics, found: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor
) -> None:
    """Record how far this model's log-probs are from those of explorers, at tokens that are learnt."""
    apart = (found.float() - recorded).abs()[mask.bool()]
    if len(apart):
        figures.mean("rollout/logprob_diff_mean", float(apart.mean()), len(apart))
        figures.top("rollout/logprob_diff_max", float(apart.max()))


def batch_metrics(batch: Batch) -> Metrics:
    """Return metrics of rewards and responses; zeros without rollouts. Tokens of tools are counted apart."""
    rewards = [row.reward for row in batch.firsts] or [0.0]
    lengths = [sum(row.action_mask) for row in batch.experiences] or [0]
    others = [len(row.action_mask) - sum(row.action_mask) for row in batch.experiences] or [0]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "response/length_mean": sum(lengths) / len(rewards),  # of a rollout, over all its segments
        "response/tokens": float(sum(lengths)),
        "response/tool_tokens_mean": sum(others) / len(rewards),
    }
