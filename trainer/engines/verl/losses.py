"""verl's losses and their metrics, averaged over tokens.

verl divides by the tokens or rows of the whole update over all ranks, so the gradient does not depend on how rows
are split; its metrics are partial sums, or means of one micro-batch, as `Metric.aggregation` says.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

from syncd.errors import ConfigError
from trainer.config.algorithms import LOSSES
from trainer.engines.verl.batches import response_values
from trainer.engines.verl.figures import StepMetrics, measure_difference
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


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of rollouts, less the entropy bonus, plus the KL loss.

    Of the columns, `segment_shares` multiplies the last two; `rollout_is_weights` has these shares already.
    """

    config: FSDPActorConfig  # verl's
    figures: StepMetrics  # collects its metrics
    share: float  # what each update is of the step: 1 / updates

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, metrics = ppo_loss(self.config, {"log_probs": model_output["log_probs"]}, data, dp_group)
        tokens = float(data["response_mask"].values().sum())
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                self._add(name, metric, tokens, data["dp_size"])
        for name, coefficient, values in self._terms(model_output, data):
            term = self._aggregated(values, data)
            loss = loss + coefficient * term
            self.figures.add(name, float(term.detach()) / data["dp_size"] * self.share)
        self._measure(model_output, data)
        return loss, {}

    def _terms(
        self, output: Mapping[str, torch.Tensor], data: TensorDict
    ) -> Iterator[tuple[str, float, torch.Tensor]]:
        """Yield name, coefficient and values of tokens of what is added to the policy's own loss."""
        if output.get("entropy") is not None:
            yield "actor/entropy", -self.config.entropy_coeff, no_padding_2_padding(output["entropy"], data)
        if "ref_log_prob" in data:
            now, start = no_padding_2_padding(output["log_probs"], data), _padded(data, "ref_log_prob")
            yield "actor/kl_loss", self.config.kl_loss_coef, kl_penalty(now, start, self.config.kl_loss_type)

    def _aggregated(self, values: torch.Tensor, data: TensorDict) -> torch.Tensor:
        if "segment_shares" in data:
            values = values * _padded(data, "segment_shares")
        mode, mask = self.config.loss_agg_mode, _padded(data, "response_mask").bool()
        loss: torch.Tensor = agg_loss(values, mask, mode, **self.config.global_batch_info)
        return loss

    def _add(self, name: str, metric: Metric, tokens: float, ranks: int) -> None:
        value = float(metric.aggregate())
        if metric.aggregation is AggregationType.SUM:
            self.figures.add(name, value / ranks * self.share)
        else:
            self.figures.mean(name, value, tokens)

    def _measure(self, output: Mapping[str, torch.Tensor], data: TensorDict) -> None:
        """Record how far the model is from explorers, unless that was measured before the updates."""
        if "rollout_log_probs" in data:
            now = response_values(output["log_probs"].detach(), data)
            recorded, mask = data["rollout_log_probs"].values(), data["response_mask"].values()
            measure_difference(self.figures, now, recorded, mask)


def _padded(data: TensorDict, name: str) -> torch.Tensor:
    tensor: torch.Tensor = data.select(name).to_padded_tensor()[name]
    return tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The clipped value loss of a critic, a mean over the tokens of an update; arguments as above."""

    config: FSDPCriticConfig
    figures: StepMetrics
    share: float

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
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
        loss, _ = sft_loss(None, model_output, data, dp_group)
        self.figures.add("sft/loss", float(loss.detach()) / data["dp_size"] * self.share)
        return loss, {}


Loss = PolicyLoss | ValueLoss | ExampleLoss  # what a model learns from


def register_own_loss(name: str, options: Mapping[str, Any]) -> None:
    """Give verl a policy loss of `trainer.losses`, called with `options` too by its own names; nothing for verl's."""
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
