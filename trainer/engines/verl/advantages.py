"""verl's advantage estimators, on the outcome rewards of a whole batch."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from syncd.errors import ConfigError
from trainer.config.model import AlgorithmSection
from trainer.experience.batch import Batch

_MEAN_OF_ROWS = "seq-mean-token-mean"


def advantages(algorithm: AlgorithmSection, batch: Batch) -> list[torch.Tensor]:
    """Return the advantage of each response token, one tensor a row, weighted by the row's weight.

    An estimator sees each rollout once: its learnt tokens over all segments end to end, with the reward at the last
    one. Groups must be whole.

    Raises:
        ConfigError: The estimator refuses such groups.
    """
    masks = [torch.tensor(list(row.learnt), dtype=torch.bool) for row in batch.experiences]
    learnt = _over_rollouts(batch, [int(mask.sum()) for mask in masks])
    if not any(learnt):
        return [torch.zeros(len(mask)) for mask in masks]
    mask = (torch.arange(max(learnt)) < torch.tensor(learnt).unsqueeze(1)).float()
    normed = bool(algorithm.norm_advantage)
    groups = [group for group, row in zip(batch.groups, batch.experiences, strict=True) if row.segment == 0]
    given: dict[str, Any] = {
        "token_level_rewards": _rewards(batch, mask),
        "response_mask": mask,
        "index": np.array([str(group) for group in groups], dtype=object),
        "norm_adv_by_std_in_grpo": normed,
        "config": AlgoConfig(adv_estimator=algorithm.advantage, norm_adv_by_std_in_grpo=normed),
    }
    return _spread(algorithm, batch, _call(algorithm.advantage, given), masks)


def _spread(
    algorithm: AlgorithmSection, batch: Batch, found: torch.Tensor, masks: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the advantages of rollouts at the tokens of their rows.

    Where each row is a mean over its own tokens, that of a segment counts by its share of the rollout's tokens.
    """
    counts = [int(mask.sum()) for mask in masks]
    # verl's sapo knows no other mode.
    takes_means = algorithm.loss_agg_mode == _MEAN_OF_ROWS or algorithm.loss == "sapo"
    whole, taken = _over_rollouts(batch, counts), [0] * len(found)
    spread = []
    for rollout, count, mask, weight in zip(batch.rollouts, counts, masks, batch.weights, strict=True):
        values = found[rollout, taken[rollout] : taken[rollout] + count].float() * weight
        taken[rollout] += count
        if takes_means and count < whole[rollout]:
            values = values * (count / whole[rollout])
        spread.append(torch.zeros(len(mask)).masked_scatter(mask, values))
    return spread


def _over_rollouts(batch: Batch, counts: Sequence[int]) -> list[int]:
    """Return the sums of rows' counts by rollout."""
    sums = [0] * len(batch.firsts)
    for rollout, count in zip(batch.rollouts, counts, strict=True):
        sums[rollout] += count
    return sums


def _call(name: str, given: dict[str, Any]) -> torch.Tensor:
    estimator = get_adv_estimator_fn(name)
    taken = inspect.signature(estimator).parameters
    try:
        found: torch.Tensor = estimator(**{key: value for key, value in given.items() if key in taken})[0]
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{name} cannot take this batch: {error}", hint="see data.group_size") from error
    return found


def _rewards(batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    """Return the reward of each rollout at its last token; one of which nothing is learnt has it for its group."""
    rewards = torch.zeros_like(mask)
    last = mask.sum(1).long().sub(1).clamp(min=0)
    rewards[torch.arange(len(mask)), last] = torch.tensor([one.reward for one in batch.firsts])
    return rewards
