"""verl's advantage estimators, on the rewards of a whole batch: of rollouts, or of their turns."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, kl_penalty

from syncd.errors import ConfigError
from syncd.experience.model import Experience
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.config.algorithms import GAE
from trainer.experience.batch import Batch

Rows = Sequence[torch.Tensor]  # a value for each response token, one tensor a row of the batch


def advantages(
    algorithm: AlgorithmSection, batch: Batch, penalties: Rows | None = None
) -> list[torch.Tensor]:
    """Return the advantage of each response token, one tensor a row, weighted by the row's weight.

    An estimator sees each rollout once: its learnt tokens over all segments end to end, with the reward at the last
    one. Groups must be whole.
    """
    normed = bool(algorithm.norm_advantage)
    rollouts = _Rollouts(batch, penalties, turns=algorithm.turn_rewards)
    groups = [group for group, row in zip(batch.groups, batch.experiences, strict=True) if row.segment == 0]
    estimated, _ = rollouts.estimate(
        algorithm.advantage,
        index=np.array([str(group) for group in groups], dtype=object),
        norm_adv_by_std_in_grpo=normed,
        config=AlgoConfig(adv_estimator=algorithm.advantage, norm_adv_by_std_in_grpo=normed),
    )
    return _weighted(algorithm, batch, rollouts.spread(estimated))


def gae(
    algorithm: AlgorithmSection, batch: Batch, values: Rows, penalties: Rows | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return advantages and returns of each response token, one tensor a row, by a critic's values before each token.

    Rollouts are as above. Advantages are whitened over the whole batch, and weighted; returns are what the critic
    learns, neither whitened nor weighted.
    """
    rollouts = _Rollouts(batch, penalties, turns=algorithm.turn_rewards)
    arguments = {"values": rollouts.joined(values), "gamma": algorithm.gamma, "lam": algorithm.lam}
    estimated, returns = rollouts.estimate(GAE, **arguments)
    return _weighted(algorithm, batch, rollouts.spread(estimated)), rollouts.spread(returns)


def reward_penalties(
    algorithm: AlgorithmSection, batch: Batch, policy: Rows, start: Rows
) -> tuple[list[torch.Tensor], float]:
    """Return what KL in the reward takes from each token's reward, and the KL of a token.

    As verl's `apply_kl_penalty`: `kl_penalty` of the log-probs before the update, `policy`, and those of the initial
    model. The KL is the mean over rollouts of the mean over their learnt tokens.
    """
    pairs = zip(policy, start, strict=True)
    penalties = [kl_penalty(own, first, algorithm.reward_kl_type) for own, first in pairs]
    rollouts = _Rollouts(batch)
    means = rollouts.joined(penalties).sum(1) / rollouts.mask.sum(1).clamp(min=1)
    return [algorithm.reward_kl_coef * values for values in penalties], float(means.mean())


class _Rollouts:
    """A batch as estimators see it: a row for each rollout, with its learnt tokens over all segments end to end.

    With `turns` each turn's reward is at its own last learnt token; else the rollout's is at its last one.
    """

    def __init__(self, batch: Batch, penalties: Rows | None = None, *, turns: bool = False) -> None:
        self._batch, self._penalties, self._turns = batch, penalties, turns
        if turns and all(row.turn_rewards is None for row in batch.experiences):
            text = "algorithm.turn_rewards needs rewards of turns, and no rollout of the batch has any"
            raise ConfigError(
                text, hint="turn_rewards = false, or an explorer that writes the column turn_rewards"
            )
        self.masks = [torch.tensor(list(row.learnt), dtype=torch.bool) for row in batch.experiences]
        learnt = batch.over_rollouts([int(mask.sum()) for mask in self.masks])
        self.mask = (torch.arange(max(learnt)) < torch.tensor(learnt).unsqueeze(1)).float()

    def joined(self, values: Rows) -> torch.Tensor:
        """Return values of response tokens as a matrix of rollouts."""
        joined, taken = torch.zeros_like(self.mask), [0] * len(self.mask)
        for rollout, mask, row in zip(self._batch.rollouts, self.masks, values, strict=True):
            learnt = row[mask]
            joined[rollout, taken[rollout] : taken[rollout] + len(learnt)] = learnt
            taken[rollout] += len(learnt)
        return joined

    def spread(self, values_of_rollouts: torch.Tensor) -> list[torch.Tensor]:
        """Return a matrix of rollouts as values of response tokens, 0 at those that are not learnt."""
        taken, spread = [0] * len(values_of_rollouts), []
        for rollout, mask in zip(self._batch.rollouts, self.masks, strict=True):
            values = values_of_rollouts[rollout, taken[rollout] : taken[rollout] + int(mask.sum())].float()
            taken[rollout] += len(values)
            spread.append(torch.zeros(len(mask)).masked_scatter(mask, values))
        return spread

    def estimate(self, name: str, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns by one of verl's estimators; zeros where nothing is learnt."""
        if not self.mask.any():
            return self.mask, self.mask
        rewards = self._turn_rewards() if self._turns else _rewards(self._batch, self.mask)
        if self._penalties is not None:
            rewards = rewards - self.joined(self._penalties)
        return _call(name, {"token_level_rewards": rewards, "response_mask": self.mask, **arguments})

    def _turn_rewards(self) -> torch.Tensor:
        """Return the reward of each turn at the last learnt token up to its end; no token has earned an earlier one.

        A rollout that does not say them has its whole reward at its last token.
        """
        rewards, taken = _rewards(self._batch, self.mask), [0] * len(self.mask)
        rows = zip(self._batch.rollouts, self.masks, self._batch.experiences, strict=True)
        for rollout, mask, row in rows:
            if row.turn_rewards is not None:
                if row.segment == 0:
                    rewards[rollout] = 0.0
                for turn in row.turn_rewards:
                    index = taken[rollout] + int(mask[: turn.end].sum()) - 1
                    if index >= 0:
                        rewards[rollout, index] += turn.reward
            taken[rollout] += int(mask.sum())
        return rewards


def _weighted(
    algorithm: AlgorithmSection, batch: Batch, values_of_rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    values_of_rows = _toward_teacher(algorithm.teacher_coef, batch, values_of_rows)
    return [values * weight for values, weight in zip(values_of_rows, batch.weights, strict=True)]


def _toward_teacher(
    coef: float, batch: Batch, values_of_rows: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return advantages less `coef` times the log of each token's probability here over that of the teacher.

    Its mean over tokens that the policy chose is an estimate of the KL divergence from the teacher, so this rewards
    each token for bringing that down. Log-probs are those of the version that chose the token; rows that the teacher
    has not read stay as they are.
    """
    if not coef:
        return values_of_rows
    if all(row.teacher_logprobs is None for row in batch.experiences):
        raise ConfigError(
            "algorithm.teacher_coef needs log-probs of a teacher, and no experience of the batch has any",
            hint="[explorer.teacher] of explorer run",
        )
    return [
        values if row.teacher_logprobs is None else values - coef * _above_teacher(row)
        for values, row in zip(values_of_rows, batch.experiences, strict=True)
    ]


def _above_teacher(row: Experience) -> torch.Tensor:
    """Return by how many nats each learnt token is likelier here than for the teacher; 0 at the others."""
    assert row.teacher_logprobs is not None
    own, teacher, learnt = (
        torch.tensor(list(values)) for values in (row.logprobs, row.teacher_logprobs, row.learnt)
    )
    return (own - teacher).masked_fill(learnt == 0, 0.0)


def _call(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    estimator = get_adv_estimator_fn(name)
    taken = inspect.signature(estimator).parameters
    try:
        estimated, returns = estimator(**{key: value for key, value in arguments.items() if key in taken})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{name} cannot take this batch: {error}", hint="see data.group_size") from error
    return estimated, returns


def _rewards(batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    """Return the reward of each rollout at its last token; one of which nothing is learnt has it for its group."""
    rewards = torch.zeros_like(mask)
    last = mask.sum(1).long().sub(1).clamp(min=0)
    rewards[torch.arange(len(mask)), last] = torch.tensor([segment.reward for segment in batch.firsts])
    return rewards
