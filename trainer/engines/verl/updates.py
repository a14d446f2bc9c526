"""The updates of one step: the gradients of a part of the batch, clipped, and one step of the optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import structlog

from syncd.errors import CorruptDataError
from syncd.transports.ranks import Ranks
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.engines.base import Metrics
from trainer.engines.verl.batches import MicroBatch, tensors
from trainer.engines.verl.losses import ExampleLoss, PolicyLoss
from trainer.engines.verl.models import Model
from trainer.engines.verl.rows import Columns, TokenRow, TrainingStep, UpdateRows, count_samples, deal
from trainer.engines.verl.settings import actor_config, entropy_in_updates

Losses = tuple[PolicyLoss | None, ExampleLoss]

MOST_SKIPPED = 10
"""Updates in a row that may be skipped before the run ends."""


class Updates:
    """Makes the updates; all ranks make the same ones.

    Args:
        config: The job's file.
        algorithm: Its algorithm, resolved.
        ranks: All ranks.
        model: What learns.
    """

    def __init__(self, config: JobConfig, algorithm: AlgorithmSection, ranks: Ranks, model: Model) -> None:
        self._config, self._algorithm, self._ranks, self._model = config, algorithm, ranks, model
        self._in_a_row = 0

    def run(self, step: TrainingStep, columns: Columns, number: int) -> Metrics:
        """Make all updates of a step and return what the optimizer did.

        Args:
            step: The step.
            columns: What the policy loss needs of each token of this rank's rollouts.
            number: The step's number, for the log.

        Raises:
            CorruptDataError: Too many updates in a row were skipped.
        """
        parts = step.parts * self._algorithm.epochs
        losses = self._losses(step, 1 / max(len(parts), 1))
        norms, rate = [], self._rate()
        for part in parts:
            rate = self._rate()
            norms.append(self._update(step, part, columns, losses))
            self._finish_update(norms[-1], number)
        done = [norm for norm in norms if math.isfinite(norm)]
        norm = sum(done) / len(done) if done else sum(norms)
        skipped = float(len(norms) - len(done))
        return {"actor/grad_norm": norm, "actor/lr": rate, "actor/updates_skipped": skipped}

    def _losses(self, step: TrainingStep, share: float) -> Losses:
        examples = ExampleLoss(step.figures, share)
        if not step.rollouts:
            return None, examples
        config = actor_config(self._config, self._algorithm, step.horizon)
        measure = self._algorithm.old_logprobs == "rollout"
        return PolicyLoss(config, step.figures, share, measure), examples

    def _update(self, step: TrainingStep, part: UpdateRows, columns: Columns, losses: Losses) -> float:
        """Make one update; return the norm of its gradient before clipping."""
        algorithm, (policy, examples) = self._algorithm, losses
        with self._model.train_mode():
            self._model.optimizer_zero_grad()
            self._add_gradients(
                policy, step.rollouts, part.rollouts, columns,
                temperature=algorithm.temperature, calculate_entropy=entropy_in_updates(algorithm),
            )  # fmt: skip
            self._add_gradients(
                examples, step.examples, part.examples, {}, temperature=1.0, calculate_entropy=False
            )
            return self._model.optimizer_step()

    def _add_gradients(
        self,
        loss: object,
        rows: Sequence[TokenRow],
        numbers: Sequence[int],
        columns: Columns,
        **settings: Any,
    ) -> None:
        """Add the gradients of this rank's share of rows; what is divided by is of all ranks."""
        if numbers:
            slots = deal(rows, numbers, self._ranks.rank, self._ranks.world_size)
            budget = MicroBatch.training(self._model.engine_config)
            settings["global_batch_size"] = count_samples(rows, numbers)
            self._model.forward_backward_batch(tensors(rows, slots, columns, budget, **settings), loss)

    def _rate(self) -> float:
        return float(self._model.lr_scheduler.get_last_lr()[0])

    def _finish_update(self, norm: float, number: int) -> None:
        """Advance the schedule after an update; verl skips one whose gradient is not finite."""
        if math.isfinite(norm):
            self._in_a_row = 0
            self._model.lr_scheduler_step()
            return
        self._in_a_row += 1
        structlog.get_logger().warning(
            "update_skipped", reason="its gradient is not finite", step=number, in_a_row=self._in_a_row
        )
        if self._in_a_row >= MOST_SKIPPED:
            hint = "resume from an earlier checkpoint with a lower algorithm.optimizer.lr"
            raise CorruptDataError(
                f"{MOST_SKIPPED} updates in a row had gradients that are not finite", hint=hint
            )
