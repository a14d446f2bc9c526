"""The updates of one step on a tinker server: which rows, with which advantages, at which learning rate."""

import math
from collections.abc import Sequence

import structlog
import torch

from syncd.jobfile.model import JobFile
from syncd.jobfile.trainer_sections import AlgorithmSection, OptimizerSection
from syncd.transports.ranks import Ranks
from trainer.config.algorithms import SFT, clip_bounds
from trainer.config.schedule import COSINE, schedule_steps
from trainer.engines.base import Metrics
from trainer.engines.verl.advantages import advantages
from trainer.engines.verl.figures import StepMetrics, advantage_metrics, measure_difference
from trainer.engines.verl.rows import TrainingStep
from trainer.engines.verl.segments import by_share, measure_mismatch
from trainer.parts.tinker.config import TINKER_LOSSES, UNCLIPPED
from trainer.parts.tinker.rows import (
    Values,
    example_row,
    example_weights,
    policy_row,
    row_scales,
)
from trainer.parts.tinker.server import TrainingServer, finite_norm

_UNBOUNDED = (0.0, math.inf)


class TinkerUpdates:
    def __init__(
        self, config: JobFile, algorithm: AlgorithmSection, server: TrainingServer, reduction: str
    ) -> None:
        self.algorithm, self._server, self._reduction = algorithm, server, reduction
        self.made = 0  # updates so far, over all starts: the learning rate follows from it
        self._end = schedule_steps(config)
        self._bounds = _ratio_bounds(algorithm)
        self._is_warned = False

    def run(self, step: TrainingStep) -> Metrics:
        norms, rate = [], self._rate()
        row_advantages = advantages(self.algorithm, step.batch) if step.rollouts else []
        columns = self._columns(step, row_advantages) if step.rollouts else ({}, {})
        parts = step.parts * self.algorithm.epochs
        for part in parts:
            rate = self._rate()
            if self.algorithm.name == SFT:
                metrics = self._learn_examples(step, part.examples, 1 / len(parts))
            else:
                metrics = self._learn_rollouts(step, part.rollouts, columns, 1 / len(parts))
            self.made += 1
            norms.append(finite_norm(metrics))
        self._warn_of(norms)
        finite = [norm for norm in norms if norm is not None]
        measured = {"actor/grad_norm": sum(finite) / len(finite)} if finite else {}
        measured |= advantage_metrics(row_advantages, step.masks) if step.rollouts else {}
        return {"actor/lr": rate, **measured}

    def _columns(self, step: TrainingStep, row_advantages: Sequence[torch.Tensor]) -> tuple[Values, Values]:
        """Return advantages and old log-probs of the response's tokens of each rollout."""
        recorded = {i: torch.tensor(list(row.logprobs)) for i, row in enumerate(step.batch.experiences)}
        weighted = dict(enumerate(by_share(self.algorithm, step.rollouts, row_advantages)))
        if self.algorithm.old_logprobs == "rollout":
            return weighted, recorded
        rows = [example_row(row, 1.0) for row in step.rollouts]
        answered = self._server.logprobs(rows)
        own = {
            at: row.response(values)
            for at, (row, values) in enumerate(zip(step.rollouts, answered, strict=True))
        }
        measure_mismatch(Ranks(), step, own, recorded)
        return weighted, own

    def _learn_rollouts(
        self, step: TrainingStep, numbers: Sequence[int], columns: tuple[Values, Values], share: float
    ) -> Metrics:
        weighted, old = columns
        rows = step.rollouts
        sent = [number for number in numbers if rows[number].mask.any()]
        mode = self.algorithm.loss_agg_mode or "token-mean"
        scales = row_scales(rows, sent, mode, step.horizon, self._reduction)
        loss, bounds = TINKER_LOSSES[self.algorithm.loss], self._bounds
        settings = {} if bounds == _UNBOUNDED else dict(zip(_THRESHOLDS, bounds, strict=True))
        data = [policy_row(rows[index], weighted[index] * scales[index], old[index]) for index in sent]
        logprobs, metrics = self._server.update(data, loss, settings, self._adam())
        whole = row_scales(rows, sent, mode, step.horizon, "sum")
        for number, values in zip(sent, logprobs, strict=True):
            self._measure(step, number, rows[number].response(values), columns, whole[number] * share)
        return metrics

    def _measure(
        self,
        step: TrainingStep,
        number: int,
        new: torch.Tensor,
        columns: tuple[Values, Values],
        scale: float,
    ) -> None:
        (weighted, old), mask = columns, step.rollouts[number].mask.bool()
        if self.algorithm.old_logprobs == "rollout":
            measure_difference(step.figures, new, old[number], mask)
        total = policy_figures(
            self.algorithm.loss,
            self._bounds,
            new[mask],
            old[number][mask],
            weighted[number][mask],
            step.figures,
        )
        step.figures.add("actor/pg_loss", total * scale)

    def _learn_examples(self, step: TrainingStep, numbers: Sequence[int], share: float) -> Metrics:
        rows = [step.examples[number] for number in numbers]
        weights = example_weights(rows, self._reduction)
        data = [example_row(row, weight) for row, weight in zip(rows, weights, strict=True)]
        logprobs, metrics = self._server.update(data, "cross_entropy", {}, self._adam())
        for row, values in zip(rows, logprobs, strict=True):
            step.figures.add(
                "sft/loss", -float(row.response(values)[row.mask.bool()].mean()) * share / len(rows)
            )
        return metrics

    def _adam(self) -> dict[str, float]:
        optimizer = self.algorithm.optimizer
        return {
            "learning_rate": self._rate(),
            "beta1": optimizer.betas[0],
            "beta2": optimizer.betas[1],
            "weight_decay": optimizer.weight_decay,
            "grad_clip_norm": optimizer.clip_grad,
        }

    def _rate(self) -> float:
        return learning_rate(self.algorithm.optimizer, self.made, self._end)

    def _warn_of(self, norms: Sequence[float | None]) -> None:
        """Warn once if the server applied a gradient that it was asked to clip, and says that it did not."""
        limit = self.algorithm.optimizer.clip_grad
        largest = max((norm for norm in norms if norm is not None), default=0.0)
        if largest > limit and not self._is_warned:
            self._is_warned = True
            structlog.get_logger().warning(
                "gradient_above_bound",
                norm=largest,
                bound=limit,
                reason="some tinker servers do not clip gradients",
            )


_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def learning_rate(optimizer: OptimizerSection, update: int, end: int) -> float:
    """Return the learning rate of an update, as the schedules of verl and transformers have it.

    `update` counts those before this one; at update `end` cosine or linear reaches its end, -1 for a constant rate.
    """
    warmup = optimizer.warmup_steps
    if update < warmup:
        return optimizer.lr * update / warmup
    if end < 0:
        return optimizer.lr
    progress = (update - warmup) / max(1, end - warmup)
    least = optimizer.min_lr_ratio
    fallen = 0.5 * (1 + math.cos(math.pi * progress)) if optimizer.schedule == COSINE else 1 - progress
    return optimizer.lr * max(least, least + (1 - least) * fallen)


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
        bounds: The least and the largest ratio.
        new: Log-probs of the learnt tokens under the model before the update.
        old: Those against which the ratio is taken.
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


def _ratio_bounds(algorithm: AlgorithmSection) -> tuple[float, float]:
    bounds = clip_bounds(algorithm)
    return _UNBOUNDED if bounds is None else (max(0.0, 1 - bounds[0]), 1 + bounds[1])
