"""verl's losses, and what they measure put where it can be averaged rightly.

verl divides by the tokens or rows of the whole update over all ranks, so the gradient does not depend on how rows
are dealt; its figures are partial sums, or means of one micro-batch, which is told by the kind of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import no_padding_2_padding

from trainer.engines.verl.figures import Figures

_NAMES = {"kl_loss": "actor/kl_loss", "actor/entropy_loss": "actor/entropy"}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of rollouts.

    Args:
        config: verl's.
        figures: Where its figures go.
        share: What each update is of the step: 1 / updates.
        measure: Whether `old_log_probs` are those of the rollouts and the difference is to be measured.
    """

    config: FSDPActorConfig
    figures: Figures
    share: float
    measure: bool = False

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch; figures are taken on the way."""
        loss, metrics = ppo_loss(self.config, model_output, data, dp_group)
        tokens = float(data["response_mask"].values().sum())
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                self._take(_NAMES.get(name, name), metric, tokens, data["dp_size"])
        if self.measure:
            self._measure(no_padding_2_padding(model_output["log_probs"], data), data)
        return loss, {}

    def _take(self, name: str, metric: Metric, tokens: float, ranks: int) -> None:
        value = float(metric.aggregate())
        if metric.aggregation is AggregationType.SUM:
            self.figures.add(name, value / ranks * self.share)
        else:
            self.figures.mean(name, value, tokens)

    def _measure(self, found: torch.Tensor, data: TensorDict) -> None:
        padded = data.select("old_log_probs", "response_mask").to_padded_tensor()
        differ(self.figures, found.detach(), padded["old_log_probs"], padded["response_mask"])


@dataclass(frozen=True, slots=True)
class ExampleLoss:
    """The negative log-likelihood of examples, a mean over the tokens of an update; arguments as above."""

    figures: Figures
    share: float

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch."""
        loss, _ = sft_loss(None, model_output, data, dp_group)
        self.figures.add("sft/loss", float(loss.detach()) / data["dp_size"] * self.share)
        return loss, {}


def differ(figures: Figures, found: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor) -> None:
    """Measure how far this model's log-probs are from those that explorers recorded, at tokens that are learnt."""
    apart = (found.float() - recorded).abs()[mask.bool()]
    if len(apart):
        figures.mean("rollout/logprob_diff_mean", float(apart.mean()), len(apart))
        figures.top("rollout/logprob_diff_max", float(apart.max()))
