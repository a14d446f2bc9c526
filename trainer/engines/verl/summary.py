"""What a batch is like, in figures: rewards, lengths, tokens. Tokens of a tool are counted apart."""

import statistics

from trainer.engines.base import Metrics
from trainer.experience.batch import Batch


def of_rollouts(batch: Batch) -> Metrics:
    """Return figures of rewards and responses; zeros where there is no rollout."""
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
