"""Trains the model on batches, once everything is built."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from syncd.transports.ranks import Ranks
from trainer.config.algorithms import SFT
from trainer.config.model import JobConfig
from trainer.config.options import correction
from trainer.engines.base import Metrics
from trainer.engines.verl import figures, state
from trainer.engines.verl.advantages import advantages
from trainer.engines.verl.batches import Found, MicroBatch, forward
from trainer.engines.verl.checks import resolve
from trainer.engines.verl.losses import correction_weights, measure_difference, register_own_loss
from trainer.engines.verl.models import Model, build_model
from trainer.engines.verl.rows import (
    Columns,
    Slots,
    TokenRow,
    TrainingStep,
    check_vocabulary,
    deal,
    limits_of,
    prepare_step,
    rollout_rows,
    token_row,
)
from trainer.engines.verl.settings import actor_config, entropy_in_updates
from trainer.engines.verl.state import apply_settings
from trainer.engines.verl.updates import Updates
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits


class Learner:
    """The model and how it learns; all ranks make the same calls with the same batches.

    Args:
        config: The job's file.
        ranks: All ranks.
        device: This rank's device.

    Raises:
        ConfigError: verl cannot do what is configured.
    """

    def __init__(self, config: JobConfig, ranks: Ranks, device: torch.device) -> None:
        self._config, self._ranks = config, ranks
        self._algorithm = resolve(config.algorithm)
        policy = self._algorithm.name != SFT
        if policy:
            register_own_loss(self._algorithm.loss)
            actor_config(config, self._algorithm, 1)
        _seed(config.job.seed)
        self.model = build_model(config, device.type)
        has_reference = policy and self._algorithm.kl_coef > 0
        self._reference = build_model(config, device.type, forward_only=True) if has_reference else None
        _seed(config.job.seed + 1 + ranks.rank)
        self._updates = Updates(config, self._algorithm, ranks, self.model)

    @property
    def tied(self) -> tuple[str, ...]:
        """Return names of weights that repeat another one."""
        module = getattr(self.model.module, "_fsdp_wrapped_module", self.model.module)
        return tuple(module.all_tied_weights_keys)

    @property
    def limits(self) -> Limits:
        """Return what of a row the model can take."""
        text_config = self.model.model_config.hf_config.get_text_config()
        budgets = [
            make(self.model.engine_config).tokens for make in (MicroBatch.training, MicroBatch.inference)
        ]
        return limits_of(self.model.module, text_config, budgets)

    def train(self, batch: Batch, number: int) -> Metrics:
        """Train on a batch as step `number`; see VerlEngine."""
        step = prepare_step(self._algorithm, batch, mixed=self._config.data.sft_ratio > 0)
        self._check(step.rows)
        columns = self._columns(step) if step.rollouts else {}
        done = self._updates.run(step, columns, number)
        done["train/tokens"] = float(sum(int(row.mask.sum()) for row in step.rows))
        described = {} if self._algorithm.name == SFT else figures.batch_metrics(batch)
        return step.figures.over(self._ranks) | done | described

    def log_probs(self, batch: Batch) -> list[torch.Tensor]:
        """Return the log-probs of response tokens, one tensor a row, on all ranks."""
        return self._all_log_probs(rollout_rows(batch), self._algorithm.temperature)

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each token after the first of each row, at temperature 1, on all ranks."""
        return [values.tolist() for values in self._all_log_probs(list(map(token_row, rows)), 1.0)]

    def save(self, directory: str) -> None:
        """Write the training state; see VerlEngine."""
        state.save_state(self.model, directory, self._ranks)

    def load(self, directory: str) -> None:
        """Resume from a training state; see VerlEngine."""
        state.load_state(self.model, directory, self._ranks)
        apply_settings(self.model.optimizer, self._config.algorithm.optimizer, self.model.lr_scheduler)

    def _all_log_probs(self, rows: Sequence[TokenRow], temperature: float) -> list[torch.Tensor]:
        self._check(rows)
        if not rows:
            return []
        own, _ = forward(self.model, rows, self._deal(rows, range(len(rows))), temperature)
        found: Found = {}
        for part in self._ranks.gather(own):
            found |= part
        return [found[number] for number in range(len(rows))]

    def _check(self, found: Sequence[TokenRow]) -> None:
        check_vocabulary(found, self.model.model_config.hf_config.get_text_config().vocab_size)
        MicroBatch.training(self.model.engine_config).check(found)

    def _columns(self, step: TrainingStep) -> Columns:
        """Return what the policy loss needs of each token of this rank's rows."""
        columns: dict[str, Found] = {"advantages": dict(enumerate(advantages(self._algorithm, step.batch)))}
        slots = [slot for part in step.parts for slot in self._deal(step.rollouts, part.rollouts)]
        recorded = {i: torch.tensor(list(row.logprobs)) for i, row in enumerate(step.batch.experiences)}
        if not slots:
            return columns
        if self._algorithm.old_logprobs == "rollout":
            columns["old_log_probs"] = recorded
        else:
            columns["old_log_probs"] = self._recomputed(step, slots, recorded)
        settings = correction(self._algorithm.options)
        if settings is not None:
            own = columns["old_log_probs"]
            columns["rollout_is_weights"] = correction_weights(
                settings, step.rollouts, own, recorded, step.figures
            )
        if self._reference is not None:
            columns["ref_log_prob"], _ = self._forward(self._reference, step.rollouts, slots)
        return columns

    def _recomputed(self, step: TrainingStep, slots: Slots, recorded: Found) -> Found:
        """Return this model's log-probs before the updates, and record how far those of explorers are from them."""
        wanted = not entropy_in_updates(self._algorithm)
        found, entropies = self._forward(self.model, step.rollouts, slots, entropy=wanted)
        for number, values in found.items():
            mask = step.rollouts[number].mask.bool()
            measure_difference(step.figures, values, recorded[number], mask)
            if wanted and mask.any():
                entropy = float(entropies[number][mask].mean())
                step.figures.mean("actor/entropy", entropy, float(mask.sum()))
        return found

    def _forward(
        self, model: Model, rollouts: Sequence[TokenRow], slots: Slots, *, entropy: bool = False
    ) -> tuple[Found, Found]:
        return forward(model, rollouts, slots, self._algorithm.temperature, entropy=entropy)

    def _deal(self, rollouts: Sequence[TokenRow], numbers: Sequence[int]) -> Slots:
        return deal(rollouts, numbers, self._ranks.rank, self._ranks.world_size)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- the state that verl saves and restores
    torch.manual_seed(seed)
