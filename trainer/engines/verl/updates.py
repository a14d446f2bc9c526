"""The updates of one step: the gradients of a part of the batch, clipped, and one step of the optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from syncd.jobfile.model import JobFile
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.transports.ranks import Ranks
from trainer.config.algorithms import OF_SEQUENCES
from trainer.engines.base import Metrics
from trainer.engines.verl.batches import MicroBatch, deal_to, forward, tensors
from trainer.engines.verl.figures import StepMetrics
from trainer.engines.verl.finite_updates import FiniteUpdates, norm_metrics
from trainer.engines.verl.losses import ExampleLoss, Loss, PolicyLoss
from trainer.engines.verl.models import Model
from trainer.engines.verl.pass_times import OPTIMIZER, PassTimes
from trainer.engines.verl.rows import (
    Columns,
    RowTensors,
    TokenRow,
    TrainingStep,
    UpdateRows,
    count_samples,
)
from trainer.engines.verl.segments import are_cut, with_ratio_of_rollouts
from trainer.engines.verl.settings import actor_config, entropy_in_updates

Losses = tuple[PolicyLoss | None, ExampleLoss]


class Updates:
    """Makes the updates of one model, the same on all ranks; `who` begins its metrics, messages name its `table`."""

    def __init__(self, model: Model, who: str, table: str, times: PassTimes) -> None:
        self._model, self._who, self._times = model, who, times
        self._finite = FiniteUpdates(table)

    def run(
        self, parts: Iterable[UpdateRows], add_gradients: Callable[[UpdateRows], None], number: int
    ) -> Metrics:
        """Make all updates of a step, each part taken when the one before is made; return what the optimizer did."""
        norms, rate = [], self._rate()
        for part in parts:
            rate = self._rate()
            with self._model.train_mode():
                self._model.optimizer_zero_grad()
                add_gradients(part)
                with self._times.measure(OPTIMIZER):
                    norms.append(self._model.optimizer_step())
            if self._finite.is_made(norms[-1], number):
                self._model.lr_scheduler_step()
        return {f"{self._who}/lr": rate} | norm_metrics(self._who, norms)

    def add_gradients(
        self,
        loss: Loss | None,
        rows: Sequence[TokenRow],
        numbers: Sequence[int],
        columns: Columns,
        **settings: Any,
    ) -> None:
        """Add the gradients of this rank's share of rows; what is divided by is of all ranks.

        Of ranks that compute the same rows, one records figures of the loss, which are sums over ranks.
        """
        if numbers and loss is not None:
            model = self._model
            if not model.is_mp_src_rank_with_outputs():
                loss = replace(loss, figures=StepMetrics())
            slots = deal_to(model, rows, numbers)
            budget = MicroBatch.training(model.engine_config)
            settings["global_batch_size"] = count_samples(rows, numbers)
            data = tensors(rows, slots, columns, budget, **settings)
            with self._times.passes(model.module, loss) as timed:
                model.forward_backward_batch(data, timed)

    def _rate(self) -> float:
        return float(self._model.optimizer.param_groups[0]["lr"])


class PolicyUpdates:
    def __init__(
        self, config: JobFile, algorithm: AlgorithmSection, ranks: Ranks, model: Model, times: PassTimes
    ) -> None:
        self._config, self._algorithm, self._ranks, self._model = config, algorithm, ranks, model
        self._updates = Updates(model, "actor", "algorithm.optimizer", times)

    def run(self, step: TrainingStep, columns: Columns, number: int) -> Metrics:
        """Make all updates of a step and return what the optimizer did; none in the critic's first steps."""
        parts = step.parts * self.epochs(number)
        losses, prepared = self._losses(step, 1 / max(len(parts), 1)), dict(columns)
        return self._updates.run(
            self._prepared(step, parts, prepared),
            lambda part: self._add_gradients(step, part, prepared, losses),
            number,
        )

    def epochs(self, number: int) -> int:
        alone = self._config.critic.enabled and number <= self._config.critic.warmup_steps
        return 0 if alone else self._algorithm.epochs

    def _prepared(
        self, step: TrainingStep, parts: Sequence[UpdateRows], prepared: dict[str, Mapping[int, torch.Tensor]]
    ) -> Iterator[UpdateRows]:
        """Yield the updates; before each one, give segments the ratio of their rollout where the loss has one."""
        old = dict(prepared.get("old_log_probs", {}))
        is_shared = self._algorithm.loss in OF_SEQUENCES and are_cut(step.rollouts)
        for at, part in enumerate(parts):
            if is_shared and (at or self._algorithm.old_logprobs == "rollout"):
                now = self._log_probs(step, part)
                prepared["old_log_probs"] = with_ratio_of_rollouts(self._ranks, step.rollouts, old, now)
            yield part

    def _log_probs(self, step: TrainingStep, part: UpdateRows) -> RowTensors:
        slots = deal_to(self._model, step.rollouts, part.rollouts)
        return forward(self._model, step.rollouts, slots, self._algorithm.temperature)[0] if slots else {}

    def _losses(self, step: TrainingStep, share: float) -> Losses:
        examples = ExampleLoss(step.figures, share)
        if not step.rollouts:
            return None, examples
        config = actor_config(self._config, self._algorithm, step.horizon)
        return PolicyLoss(config, step.figures, share), examples

    def _add_gradients(self, step: TrainingStep, part: UpdateRows, columns: Columns, losses: Losses) -> None:
        algorithm, (policy, examples) = self._algorithm, losses
        self._updates.add_gradients(
            policy, step.rollouts, part.rollouts, columns,
            temperature=algorithm.temperature, calculate_entropy=entropy_in_updates(algorithm),
        )  # fmt: skip
        self._updates.add_gradients(
            examples, step.examples, part.examples, {}, temperature=1.0, calculate_entropy=False
        )
