"""The figures of an update, computed here from the log-probs that the server returns with it."""

import torch

from trainer.config.tinker import UNCLIPPED
from trainer.engines.verl.figures import StepMetrics


def policy_figures(
    loss: str,
    bounds: tuple[float, float],
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    figures: StepMetrics,
) -> float:
    """Record how far the ratio is from 1, and return the sum of the losses of a row's learnt tokens.

    Args:
        loss: `algorithm.loss`.
        bounds: The least and the largest ratio.
        new: Log-probs of the learnt tokens under the model before the update.
        old: Those against which the ratio is taken.
        advantages: Of the same tokens.
        figures: Collects `actor/ppo_kl` and `actor/pg_clipfrac`.
    """
    ratio = (new - old).exp()
    clipped = ratio if loss == UNCLIPPED else ratio.clamp(*bounds)
    if loss == "cispo":
        losses, is_clipped = -clipped * advantages * new, clipped != ratio
    else:
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        is_clipped = -clipped * advantages > -ratio * advantages
    count = float(len(new))
    figures.mean("actor/ppo_kl", float((old - new).mean()), count)
    figures.mean("actor/pg_clipfrac", float(is_clipped.float().mean()), count)
    return float(losses.sum())
