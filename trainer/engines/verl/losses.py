"""verl's losses, the weights of rollout correction, and their metrics, averaged over tokens.

verl divides by the tokens or rows of the whole update over all ranks, so the gradient does not depend on how rows
are split; its metrics are partial sums, or means of one micro-batch, as `Metric.aggregation` says.

Rollout correction: explorers sample with other kernels, or an older version, than the model that learns. With
`algorithm.options.policy_loss.rollout_correction` the loss of each token is multiplied by the ratio of this model's
probability before the update to the explorer's, bounded (verl's decoupled mode: truncated importance sampling). The
formula is that of verl's `compute_rollout_correction_weights`, which is not called because it also measures the whole
batch that it is given, and divides by zero if every weight of it is 0.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

from syncd.errors import ConfigError
from trainer.config.algorithms import LOSSES
from trainer.engines.verl.batches import Found
from trainer.engines.verl.figures import StepMetrics, measure_difference
from trainer.engines.verl.rows import TokenRow
from trainer.plugins import POLICY_LOSSES

_GIVEN_TO_LOSSES = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
"""What verl calls a loss with."""

_NAMES = {"kl_loss": "actor/kl_loss", "actor/entropy_loss": "actor/entropy"}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of rollouts.

    Args:
        config: verl's.
        figures: Collects its metrics.
        share: What each update is of the step: 1 / updates.
        measure: Whether `old_log_probs` are those of the rollouts and the difference is to be measured.
    """

    config: FSDPActorConfig
    figures: StepMetrics
    share: float
    measure: bool = False

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch; its metrics are recorded."""
        loss, metrics = ppo_loss(self.config, model_output, data, dp_group)
        tokens = float(data["response_mask"].values().sum())
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                self._add(_NAMES.get(name, name), metric, tokens, data["dp_size"])
        if self.measure:
            self._measure(no_padding_2_padding(model_output["log_probs"], data), data)
        return loss, {}

    def _add(self, name: str, metric: Metric, tokens: float, ranks: int) -> None:
        value = float(metric.aggregate())
        if metric.aggregation is AggregationType.SUM:
            self.figures.add(name, value / ranks * self.share)
        else:
            self.figures.mean(name, value, tokens)

    def _measure(self, found: torch.Tensor, data: TensorDict) -> None:
        padded = data.select("old_log_probs", "response_mask").to_padded_tensor()
        measure_difference(self.figures, found.detach(), padded["old_log_probs"], padded["response_mask"])


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The clipped value loss of a critic, a mean over the tokens of an update; arguments as above."""

    config: FSDPCriticConfig
    figures: StepMetrics
    share: float

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch; its metrics are recorded."""
        loss, metrics = value_loss(self.config, model_output, data, dp_group)
        self.figures.add("critic/vf_loss", float(loss.detach()) / data["dp_size"] * self.share)
        tokens = float(data["response_mask"].values().sum())
        self.figures.mean("critic/vf_clipfrac", metrics["critic/vf_clipfrac"], tokens)
        return loss, {}


@dataclass(frozen=True, slots=True)
class ExampleLoss:
    """The negative log-likelihood of examples, a mean over the tokens of an update; arguments as above."""

    figures: StepMetrics
    share: float

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch."""
        loss, _ = sft_loss(None, model_output, data, dp_group)
        self.figures.add("sft/loss", float(loss.detach()) / data["dp_size"] * self.share)
        return loss, {}


Loss = PolicyLoss | ValueLoss | ExampleLoss
"""What a model learns from."""


def register_own_loss(name: str, options: Mapping[str, Any]) -> None:
    """Give verl a policy loss of the entry point group `trainer.losses`; nothing for verl's losses.

    Args:
        name: Its name.
        options: What it is called with besides what verl calls losses with, by its own names.

    Raises:
        ConfigError: It cannot be imported, or does not take these options.
    """
    if name in LOSSES:
        return
    loss = POLICY_LOSSES.get(name)
    try:
        inspect.signature(loss).bind_partial(**dict.fromkeys(_GIVEN_TO_LOSSES), **options)
    except TypeError as error:
        raise ConfigError(
            f"the loss {name} cannot be called: {error}",
            hint="algorithm.loss_options are arguments of its function, by their names",
        ) from error
    register_policy_loss(name)(partial(loss, **options))


_MOST = 20.0
"""The log of a ratio at most, as in verl: exp(20) is still a number that can be multiplied."""


def correction_weights(
    settings: Mapping[str, Any], rows: Sequence[TokenRow], own: Found, recorded: Found, figures: StepMetrics
) -> Found:
    """Return the weight of each response token of this rank's rows.

    A row's weights depend on that row alone, whatever rank and micro-batch it is in.

    Args:
        settings: `rollout_is` and `rollout_is_threshold`, as verl has them.
        rows: All rollouts.
        own: This model's log-probs before the update, by the row's number.
        recorded: The log-probs that explorers recorded.
        figures: Collects the mean weight.
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
