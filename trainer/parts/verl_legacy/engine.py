"""verl 0.7.1's worker behind the trainer's interface: the model, and how it learns."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from syncd.errors import ConfigError
from trainer.config.algorithms import SFT
from trainer.config.model_files import companions
from trainer.engines.base import Metrics
from trainer.engines.files import FileEngine
from trainer.engines.state_copy import TrainingState
from trainer.engines.verl import figures
from trainer.engines.verl.advantages import advantages
from trainer.engines.verl.checks import resolve
from trainer.engines.verl.finite_updates import FiniteUpdates, norm_metrics
from trainer.engines.verl.rows import (
    Columns,
    RowTensors,
    Slots,
    TokenRow,
    TrainingStep,
    check_vocabulary,
    count_samples,
    deal,
    fill,
    gather_rows,
    limits_of,
    prepare_step,
    token_row,
)
from trainer.engines.verl.segments import by_share, measure_mismatch
from trainer.engines.verl.state import apply_settings, load_state, seed_generators, training_files
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits
from trainer.parts.verl_legacy.batches import forward, padded
from trainer.parts.verl_legacy.worker import LegacyModel, build_model


class LegacyVerlEngine(FileEngine):
    """FSDP2 by the worker of verl 0.7.1, without Ray: ranks are processes of torchrun, srun, or `trainer train`."""

    def build(self) -> None:
        config, ranks = self.context.config, self.context.ranks
        self._algorithm = resolve(config.algorithm)
        self._finite = FiniteUpdates("algorithm.optimizer")
        seed_generators(config.job.seed)
        self.model: Any = build_model(config, self._algorithm, ranks)
        seed_generators(config.job.seed + 1 + ranks.rank)

    @property
    def limits(self) -> Limits:
        return limits_of(self.model.module, self._text_config, ())

    def train(self, batch: Batch, step: int) -> Metrics:
        prepared = prepare_step(self._algorithm, batch, mixed=False)
        if prepared.rollouts and prepared.examples:
            hint = 'data.sft_ratio = 0, or engine.name = "verl"'
            raise ConfigError(
                "the engine verl_legacy learns rollouts or examples, not both in a step", hint=hint
            )
        check_vocabulary(prepared.rows, self._text_config.vocab_size)
        if prepared.rollouts:
            columns, done = self._columns(prepared)
        else:
            columns, done = _columns_of_examples(prepared.examples), {}
        done |= self._update_all(prepared, columns, step)
        return prepared.figures.over(self.context.ranks) | done | prepared.described(self._algorithm)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.module.state_dict().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    @property
    def tied(self) -> Collection[str]:
        module = self.model.module
        is_tied = module.config.get_text_config().tie_word_embeddings
        return tuple(module._tied_weights_keys or ()) if is_tied else ()  # noqa: SLF001 - transformers 4 has no other

    def companions(self) -> Mapping[str, bytes]:
        config = self.context.config
        dtype = config.model.dtype if config.sync.dtype == "keep" else config.sync.dtype
        return companions(config.model.path, dtype, code=config.model.trust_remote_code)

    def training_state(self) -> TrainingState:
        return training_files(self.model, self.context.ranks)

    def load_training_state(self, directory: str) -> None:
        load_state(self.model, directory, self.context.ranks)
        optimizer = self.context.config.algorithm.optimizer
        apply_settings(self.model.optimizer, optimizer, self.model.lr_scheduler)

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        asked = list(map(token_row, rows))
        check_vocabulary(asked, self._text_config.vocab_size)
        own, _ = self._forward(self.model, asked, self._deal(asked, range(len(asked))), temperature=1.0)
        answers = gather_rows(self.context.ranks, own)
        return [answers[number].tolist() for number in range(len(asked))]

    @property
    def _text_config(self) -> Any:
        return self.model.module.config.get_text_config()

    def _columns(self, step: TrainingStep) -> tuple[Columns, Metrics]:
        """Return what the policy loss needs of each token of this rank's rows, and figures of the advantages."""
        row_advantages = advantages(self._algorithm, step.batch)
        done = figures.advantage_metrics(row_advantages, step.masks)
        weighted = by_share(self._algorithm, step.rollouts, row_advantages)
        columns: dict[str, RowTensors] = {"advantages": dict(enumerate(weighted))}
        recorded = {i: torch.tensor(list(row.logprobs)) for i, row in enumerate(step.batch.experiences)}
        if self._algorithm.old_logprobs == "rollout":
            # The worker does not show the log-probs of its updates, so there is nothing to compare with.
            step.figures.drop(*figures.MISMATCH, "rollout_corr/logprob_diff_max")
            return columns | {"old_log_probs": recorded}, done
        slots = [slot for part in step.parts for slot in self._deal(step.rollouts, part.rollouts)]
        own, entropies = self._forward(self.model, step.rollouts, slots, entropy=True) if slots else ({}, {})
        measure_mismatch(self.context.ranks, step, own, recorded)
        for number in own:
            mask = step.rollouts[number].mask.bool()
            if mask.any():
                step.figures.mean("actor/entropy", float(entropies[number][mask].mean()), float(mask.sum()))
        return columns | {"old_log_probs": own}, done

    def _update_all(self, step: TrainingStep, columns: Columns, number: int) -> Metrics:
        parts, norms, rate = step.parts * self._algorithm.epochs, list[float](), self._rate()
        for part in parts:
            rate = self._rate()
            norms.append(self._update(step, part.rollouts or part.examples, columns, 1 / len(parts)))
            if self._finite.is_made(norms[-1], number):
                self.model.lr_scheduler.step()
        return {"actor/lr": rate} | norm_metrics("actor", norms)

    def _update(self, step: TrainingStep, numbers: Sequence[int], columns: Columns, share: float) -> float:
        """Make one update; return the norm of its gradient before clipping."""
        rows, ranks = step.rollouts or step.examples, self.context.ranks.world_size
        slots, size = fill(self._deal(rows, numbers), self.context.config.engine.micro_batch_size)
        actor, count = self.model.actor.config, len(slots) // size
        actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu = len(slots), size
        # The worker takes the mean of micro-batches and FSDP that of ranks: both are undone by `dp_size`, so that
        # each token counts alike however rows are split.
        actor.global_batch_info.update(
            dp_size=ranks * count,
            batch_num_tokens=sum(int(rows[row].mask.sum()) for row in numbers),
            global_batch_size=count_samples(rows, numbers),
            loss_scale_factor=self._algorithm.options.get("loss_scale_factor", step.horizon),
        )
        data = padded(rows, slots, columns, temperature=self._temperature)
        metrics = self.model.actor.update_policy(data)
        self._measure(step, metrics, data.batch["response_mask"].split(size), share)
        return float(metrics["actor/grad_norm"][-1])

    def _measure(
        self, step: TrainingStep, metrics: Mapping[str, Any], masks: Sequence[torch.Tensor], share: float
    ) -> None:
        """Record the figures of an update: the loss is a part of all ranks', others are means of micro-batches."""
        name = "actor/pg_loss" if step.rollouts else "sft/loss"
        step.figures.add(name, metrics["actor/pg_loss"] / self.context.ranks.world_size * share)
        for figure in ("actor/ppo_kl", "actor/pg_clipfrac"):
            for value, mask in zip(metrics.get(figure, ()), masks, strict=False):
                step.figures.mean(figure, value, float(mask.sum()))

    def _rate(self) -> float:
        return float(self.model.lr_scheduler.get_last_lr()[0])

    @property
    def _temperature(self) -> float:
        return 1.0 if self._algorithm.name == SFT else self._algorithm.temperature

    def _forward(
        self,
        model: LegacyModel,
        rows: Sequence[TokenRow],
        slots: Slots,
        *,
        temperature: float | None = None,
        entropy: bool = False,
    ) -> tuple[RowTensors, RowTensors]:
        size = self.context.config.engine.infer_micro_batch_size
        chosen = self._temperature if temperature is None else temperature
        return forward(model, rows, slots, size, chosen, entropy=entropy)

    def _deal(self, rows: Sequence[TokenRow], numbers: Sequence[int]) -> Slots:
        return deal(rows, numbers, self.context.ranks.rank, self.context.ranks.world_size)


def _columns_of_examples(rows: Sequence[TokenRow]) -> Columns:
    """Return what makes GPG's loss the negative log-likelihood: advantages of 1."""
    ones = {number: torch.ones(len(row.mask)) for number, row in enumerate(rows)}
    return {
        "advantages": ones,
        "old_log_probs": {number: torch.zeros_like(value) for number, value in ones.items()},
    }
