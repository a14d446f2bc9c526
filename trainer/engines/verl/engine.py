"""verl's FSDP engines behind the trainer's interface: the model, and how it learns."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from trainer.config.algorithms import SFT, needs_start_model
from trainer.config.critic import algorithm_of
from trainer.config.model_files import companions
from trainer.config.options import correction
from trainer.config.strategies import strategy_of
from trainer.engines.base import Metrics
from trainer.engines.files import FileEngine
from trainer.engines.state_copy import TrainingState
from trainer.engines.verl import figures
from trainer.engines.verl.adapters import Adapter, WithoutAdapter, base_file, is_of_adapter, require_base
from trainer.engines.verl.advantages import advantages, reward_penalties
from trainer.engines.verl.batches import MicroBatch, deal_to, forward, require_separate_rows
from trainer.engines.verl.checks import resolve
from trainer.engines.verl.correction import correction_weights
from trainer.engines.verl.critic import Critic
from trainer.engines.verl.losses import register_own_loss
from trainer.engines.verl.models import Answering, build_model
from trainer.engines.verl.pass_times import OLD_LOG_PROBS, REFERENCE, PassTimes
from trainer.engines.verl.release import whole_weights
from trainer.engines.verl.rows import (
    Columns,
    RowTensors,
    Slots,
    TokenRow,
    TrainingStep,
    check_vocabulary,
    gather_rows,
    limits_of,
    prepare_step,
    token_row,
)
from trainer.engines.verl.segments import (
    are_cut,
    is_mean_of_rollouts,
    measure_mismatch,
    with_shares,
)
from trainer.engines.verl.settings import actor_config, entropy_in_updates
from trainer.engines.verl.state import apply_settings, load_state, seed_generators, training_files
from trainer.engines.verl.updates import PolicyUpdates
from trainer.engines.verl.utilization import Utilization
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits


class VerlEngine(FileEngine):
    """FSDP2 or FSDP by verl, without Ray: ranks are processes of torchrun, srun, or `trainer train`."""

    trains_adapters: ClassVar[bool] = True

    def build(self) -> None:
        config, ranks, device = self.context.config, self.context.ranks, self.context.device.type
        self._algorithm = resolve(algorithm_of(config))
        policy = self._algorithm.name != SFT
        if policy:
            register_own_loss(self._algorithm.loss, self._algorithm.loss_options)
            actor_config(config, self._algorithm, 1)
        seed_generators(config.job.seed)
        self.model = build_model(config, device)
        self._adapter = Adapter(self.model) if config.model.lora.rank else None
        if config.engine.packing and strategy_of(config) is None:  # others know the ends of rows
            vocabulary = self._text_config.vocab_size
            require_separate_rows(self.model, vocabulary, "log_probs", config.engine.compute_dtype)
        self._reference = self._start_model(device) if needs_start_model(self._algorithm) else None
        self._critic = Critic(self.context) if config.critic.enabled else None
        if self._critic is not None:
            self._critic.check_vocabulary(self._text_config.vocab_size)
        seed_generators(config.job.seed + 1 + ranks.rank)
        self._times = PassTimes(device)
        self._update_seconds = 0.0
        self._utilization = Utilization("actor", self.model.model_config.hf_config, device, ranks.world_size)
        self._updates = PolicyUpdates(config, self._algorithm, ranks, self.model, self._times)

    @property
    def limits(self) -> Limits:
        budgets = [
            make(self.model.engine_config).longest for make in (MicroBatch.training, MicroBatch.inference)
        ]
        own = limits_of(self.model.module, self._text_config, budgets)
        return own if self._critic is None else own.within(self._critic.limits(budgets))

    def train(self, batch: Batch, step: int) -> Metrics:
        prepared = prepare_step(self._algorithm, batch, mixed=self.context.config.data.sft_ratio > 0)
        self._check(prepared.rows)
        self._times.start()
        columns, done = self._columns(prepared, step) if prepared.rollouts else ({}, {})
        begin = time.perf_counter()
        done |= self._updates.run(prepared, columns, step)
        self._update_seconds = time.perf_counter() - begin
        trained = prepared.updated_lengths(self._updates.epochs(step))
        done |= self._utilization.of(trained, self._update_seconds)
        return prepared.figures.over(self.context.ranks) | done | prepared.described(self._algorithm)

    @property
    def step_times(self) -> Metrics:
        own = {"timing_s/update_actor": self._update_seconds, **self._times.seconds()}
        return own if self._critic is None else own | self._critic.step_times

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the whole weights by their Hugging Face names, or over the adapter if steps are adapters."""
        config = self.context.config
        if self._adapter is None:
            yield from whole_weights(self.model)
        elif config.model.publishes_adapters:
            yield from self._adapter.tensors()
        else:
            yield from self._adapter.merged(keep=config.sync.dtype == "keep")

    @property
    def tied(self) -> Collection[str]:
        if self.context.config.model.publishes_adapters:
            return ()
        module = getattr(self.model.module, "_fsdp_wrapped_module", self.model.module)
        return tuple(module.all_tied_weights_keys)

    def companions(self) -> Mapping[str, bytes]:
        config = self.context.config
        if self._adapter is not None and config.model.publishes_adapters:
            return self._adapter.companions(config.model.path)
        dtype = config.model.dtype if config.sync.dtype == "keep" else config.sync.dtype
        return companions(config.model.path, dtype, code=config.model.trust_remote_code)

    def training_state(self) -> TrainingState:
        """Return this rank's weights (with LoRA the adapter's), optimizer, schedule and RNG, and the critic's."""
        if self._adapter is None or self.base is None:
            own = training_files(self.model, self.context.ranks)
        else:
            own = training_files(self.model, self.context.ranks, wanted=is_of_adapter)
            own |= base_file(self.base) if self.context.ranks.rank == 0 else {}
        return own if self._critic is None else own | self._critic.training_state()

    def load_training_state(self, directory: str) -> None:
        """Resume where it was written, by any number of ranks; `load_state` says what is exact."""
        if self.base is not None:
            require_base(directory, self.base)
        load_state(self.model, directory, self.context.ranks)
        optimizer = self.context.config.algorithm.optimizer
        apply_settings(self.model.optimizer, optimizer, self.model.lr_scheduler)
        if self._critic is not None:
            self._critic.load(directory)

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._answer(self.model, rows)

    def start_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return what the model at `model.path` answers: without the adapter, which a run may start from."""
        return self._answer(self.model if self._adapter is None else WithoutAdapter(self.model), rows)

    def _answer(self, model: Answering, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        asked = list(map(token_row, rows))
        self._check(asked)
        own, _ = forward(model, asked, self._deal(asked, range(len(asked))), 1.0)
        answers = gather_rows(self.context.ranks, own)
        return [answers[number].tolist() for number in range(len(asked))]

    def _start_model(self, device: str) -> Answering:
        """Return the model at `model.path` to compare with: a second one, unless this one has it below an adapter."""
        if self._adapter is not None:
            return WithoutAdapter(self.model)
        return build_model(self.context.config, device, forward_only=True)

    @property
    def _text_config(self) -> Any:
        return self.model.model_config.hf_config.get_text_config()

    def _check(self, rows: Sequence[TokenRow]) -> None:
        check_vocabulary(rows, self._text_config.vocab_size)
        MicroBatch.training(self.model.engine_config).check(rows)

    def _columns(self, step: TrainingStep, number: int) -> tuple[Columns, Metrics]:
        """Return what the policy loss needs of each token of this rank's rows, and metrics of the critic."""
        columns = self._log_probs(step)
        penalties, measured = self._penalties(step, columns)
        if self._critic is None:
            row_advantages, done = advantages(self._algorithm, step.batch, penalties), Metrics()
        else:
            row_advantages, done = self._critic.train(step, self._algorithm, number, penalties)
        measured |= figures.advantage_metrics(row_advantages, step.masks)
        return {**columns, "advantages": dict(enumerate(row_advantages))}, done | measured

    def _penalties(
        self, step: TrainingStep, columns: dict[str, RowTensors]
    ) -> tuple[list[torch.Tensor] | None, Metrics]:
        """Return what KL in the reward takes of each token, None without it; all ranks have it of all rollouts."""
        if not self._algorithm.reward_kl_coef:
            return None, {}
        start = columns.get("ref_log_prob", {})
        if not self._algorithm.kl_coef:
            columns.pop("ref_log_prob", None)
        # No rank computes the rows of a part of which nothing is learnt: they take nothing of a reward.
        nothing = {at: (torch.zeros(len(mask)),) * 2 for at, mask in enumerate(step.masks)}
        own = {at: (columns["old_log_probs"][at], values) for at, values in start.items()}
        both = nothing | gather_rows(self.context.ranks, own)
        policy, first = zip(*both.values(), strict=True)
        penalties, kl = reward_penalties(self._algorithm, step.batch, policy, first)
        return penalties, {"actor/reward_kl_penalty": kl}

    def _log_probs(self, step: TrainingStep) -> dict[str, RowTensors]:
        columns: dict[str, RowTensors] = {}
        slots = [slot for part in step.parts for slot in self._deal(step.rollouts, part.rollouts)]
        if not slots:
            return columns
        recorded = {i: torch.tensor(list(row.logprobs)) for i, row in enumerate(step.batch.experiences)}
        if self._algorithm.old_logprobs == "rollout":
            columns |= {"old_log_probs": recorded, "rollout_log_probs": recorded}
        else:
            columns |= self._recomputed(step, slots, recorded)
        if is_mean_of_rollouts(self._algorithm) and are_cut(step.rollouts):
            columns |= with_shares(step.rollouts, columns)
        if self._reference is not None:
            with self._times.measure(REFERENCE):
                columns["ref_log_prob"], _ = self._forward(self._reference, step.rollouts, slots)
        return columns

    def _recomputed(self, step: TrainingStep, slots: Slots, recorded: RowTensors) -> dict[str, RowTensors]:
        """Return this model's log-probs before the updates, with the weights that correct for those of explorers."""
        wanted = not entropy_in_updates(self._algorithm)
        with self._times.measure(OLD_LOG_PROBS):
            own, entropies = self._forward(self.model, step.rollouts, slots, entropy=wanted)
        for number, values in entropies.items():
            mask = step.rollouts[number].mask.bool()
            if mask.any():
                step.figures.mean("actor/entropy", float(values[mask].mean()), float(mask.sum()))
        whole = measure_mismatch(self.context.ranks, step, own, recorded)
        columns, settings = {"old_log_probs": own}, correction(self._algorithm.options)
        if settings is not None:
            columns["rollout_is_weights"] = correction_weights(
                settings, step.rollouts, own, recorded, whole, step.figures
            )
        return columns

    def _forward(
        self, model: Answering, rollouts: Sequence[TokenRow], slots: Slots, *, entropy: bool = False
    ) -> tuple[RowTensors, RowTensors]:
        return forward(model, rollouts, slots, self._algorithm.temperature, entropy=entropy)

    def _deal(self, rollouts: Sequence[TokenRow], numbers: Sequence[int]) -> Slots:
        return deal_to(self.model, rollouts, numbers)
