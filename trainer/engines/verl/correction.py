"""Off-policy correction: explorers sample with other kernels, or an older version, than the model that learns.

With `algorithm.options.policy_loss.rollout_correction` the loss of each token is multiplied by the ratio r of this
model's probability before the update to the explorer's, bounded (verl's decoupled mode). With the ratio to the model
before the update, which every loss has, that is decoupled PPO (Hilton et al., "Batch size-invariance for policy
optimization", 2022): the explorer's policy has drawn the tokens, and the model before the update is the proximal one.

The formula is that of verl's `compute_rollout_correction_weights`, which is not called because it also measures the
whole batch that it is given, divides by zero if every weight of it is 0, and takes each row for a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.engines.verl.figures import MOST, StepMetrics
from trainer.engines.verl.rows import RowTensors, TokenRow

SEQUENCE = "sequence"


def correction_weights(
    settings: Mapping[str, Any],
    rows: Sequence[TokenRow],
    own: RowTensors,
    recorded: RowTensors,
    of_rollouts: Mapping[int, float],
    figures: StepMetrics,
) -> RowTensors:
    """Return the weight of each response token of this rank's rows; 0 of those that are not learnt.

    A weight depends on the token's rollout alone, whatever ranks and micro-batches have its segments.

    Args:
        settings: `rollout_is` and `rollout_is_threshold`, as verl has them.
        own: This model's log-probs before the update, by the row's number.
        of_rollouts: For each row the sum of log r over the learnt tokens of its rollout.
    """
    weights_by_row: RowTensors = {}
    for number, log_probs in own.items():
        mask = rows[number].mask
        apart = (log_probs.double() - recorded[number].double()) * mask
        if settings["rollout_is"] == SEQUENCE:
            apart = torch.full_like(apart, of_rollouts[number])
        ratios = apart.clamp(-MOST, MOST).exp()
        weights = bounded(ratios, settings["rollout_is_threshold"])
        weights_by_row[number] = (weights * mask).float()
        if tokens := int(mask.sum()):
            chosen = mask.bool()
            figures.mean("rollout_corr/rollout_is_mean", float(weights[chosen].mean()), tokens)
            out = (weights != ratios)[chosen].double()
            figures.mean("rollout_corr/rollout_is_oob_ratio", float(out.mean()), tokens)
    return weights_by_row


def bounded(ratios: torch.Tensor, threshold: float | str) -> torch.Tensor:
    """Return ratios cut at an upper bound; of `"lower_upper"`, those outside of both become 0."""
    *lower, upper = (float(part) for part in str(threshold).split("_"))
    if not lower:
        return ratios.clamp(max=upper)
    return torch.where((ratios >= lower[0]) & (ratios <= upper), ratios, torch.zeros_like(ratios))
