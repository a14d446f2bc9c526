"""Rollout correction: what explorers' log-probs say of each token's weight in the loss.

Explorers sample with other kernels, or an older version, than the model that learns. With
`algorithm.options.policy_loss.rollout_correction` the loss of each token is multiplied by the ratio of this model's
probability before the update to the explorer's, bounded (verl's decoupled mode: truncated importance sampling).

The formula is that of verl's `compute_rollout_correction_weights`. That function is not called because it also
measures the whole batch that it is given, and divides by zero where every weight of it is 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.engines.verl.figures import Figures
from trainer.engines.verl.passes import Found
from trainer.engines.verl.rows import Row

_MOST = 20.0
"""The log of a ratio at most, as in verl: exp(20) is still a number that can be multiplied."""


def weights(
    settings: Mapping[str, Any], rows: Sequence[Row], own: Found, recorded: Found, figures: Figures
) -> Found:
    """Return the weight of each response token of this rank's rows.

    A row's weights depend on that row alone, so it does not matter which rank and which micro-batch it is in.

    Args:
        settings: `rollout_is` and `rollout_is_threshold`, as verl has them.
        rows: All rollouts.
        own: This model's log-probs before the update, by the row's number.
        recorded: The log-probs that explorers recorded.
        figures: Where the mean weight goes.
    """
    found: Found = {}
    for number, log_probs in own.items():
        mask = rows[number].mask
        apart = (log_probs - recorded[number]) * mask
        if settings["rollout_is"] == "sequence":
            apart = apart.sum().expand_as(apart)
        found[number] = bounded(apart.clamp(-_MOST, _MOST).exp(), settings["rollout_is_threshold"]) * mask
        tokens = float(mask.sum())
        figures.mean("rollout/is_weight_mean", float(found[number].sum()) / max(tokens, 1.0), tokens)
    return found


def bounded(ratios: torch.Tensor, threshold: float | str) -> torch.Tensor:
    """Return ratios cut at an upper bound; of `"lower_upper"`, those outside of both become 0."""
    *lower, upper = (float(part) for part in str(threshold).split("_"))
    if not lower:
        return ratios.clamp(max=upper)
    return torch.where((ratios >= lower[0]) & (ratios <= upper), ratios, torch.zeros_like(ratios))
