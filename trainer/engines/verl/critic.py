"""The critic of PPO: its values of a batch, what it learns from their returns, and its part of a full checkpoint."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from syncd.errors import ConfigError
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.checkpoints import CRITIC, HUGGINGFACE
from trainer.config.critic import critic_epochs, critic_mini_batches, critic_path
from trainer.config.model_files import companions
from trainer.engines.base import EngineContext, Metrics
from trainer.engines.verl.advantages import gae
from trainer.engines.verl.batches import deal_to, forward_values, require_separate_rows
from trainer.engines.verl.figures import value_metrics
from trainer.engines.verl.losses import ValueLoss
from trainer.engines.verl.models import build_critic
from trainer.engines.verl.pass_times import PassTimes
from trainer.engines.verl.rows import (
    TokenRow,
    TrainingStep,
    UpdateRows,
    gather_rows,
    limits_of,
    split_updates,
)
from trainer.engines.verl.settings import VALUE_HEAD, critic_config
from trainer.engines.verl.state import apply_settings, load_state, training_files
from trainer.engines.verl.updates import Updates
from trainer.engines.verl.utilization import Utilization
from trainer.experience.limits import Limits

VALUES, UPDATE_CRITIC, WHOLE = "timing_s/values", "timing_s/update_critic", "timing_s/critic"

Rows = list[torch.Tensor]  # one number for each response token, one tensor a row


class Critic:
    """A model with one number for each token: the reward that it expects from there on."""

    def __init__(self, context: EngineContext) -> None:
        self._config, self._ranks = context.config, context.ranks
        self.model = build_critic(context.config, context.device.type)
        if context.config.engine.packing:
            vocabulary, dtype = self._text_config.vocab_size, context.config.engine.compute_dtype
            require_separate_rows(self.model, vocabulary, "values", dtype)
        self._times, self._seconds = PassTimes(context.device.type, "timing_s/critic_"), Metrics()
        config, ranks = self.model.model_config.hf_config, context.ranks
        self._utilization = Utilization("critic", config, context.device.type, ranks.world_size)
        self._updates = Updates(self.model, "critic", "critic.optimizer", self._times)

    def check_vocabulary(self, size: int) -> None:
        own = self._text_config.vocab_size
        if own < size:
            text = f"a critic of {own} tokens for a policy of {size}"
            raise ConfigError(text, path=critic_path(self._config), hint="leave critic.path out")

    def limits(self, budgets: Sequence[int | None]) -> Limits:
        return limits_of(self.model.module, self._text_config, budgets)

    def train(
        self, step: TrainingStep, algorithm: AlgorithmSection, number: int, penalties: Rows | None = None
    ) -> tuple[Rows, Metrics]:
        """Learn from the rollouts of a step, less penalties of rewards; return their advantages and metrics.

        Values, advantages and returns are computed over the whole batch before the first update.
        """
        start = time.perf_counter()
        self._times.start()
        values = self._values(step.rollouts)
        valued = time.perf_counter()
        advantages, returns = gae(algorithm, step.batch, values, penalties)
        learning = time.perf_counter()
        done = self._learn(step, values, returns, number)
        end = time.perf_counter()
        self._seconds = {VALUES: valued - start, UPDATE_CRITIC: end - learning, WHOLE: end - start}
        lengths = [len(row.tokens) for row in step.rollouts] * critic_epochs(self._config)
        done |= self._utilization.of(lengths, end - learning)
        return advantages, done | value_metrics(values, returns, step.masks)

    @property
    def step_times(self) -> Metrics:
        return self._seconds | self._times.seconds()

    def training_state(self) -> dict[str, Any]:
        """Return this rank's part of weights and optimizer, schedule and RNG; of rank 0, config and tokenizer too."""
        files = training_files(self.model, self._ranks)
        if self._ranks.rank == 0:
            files |= {f"{HUGGINGFACE}/{name}": content for name, content in self._companions().items()}
        return {f"{CRITIC}/{name}": content for name, content in files.items()}

    def load(self, directory: str) -> None:
        """Resume where it was written, by any number of ranks; `load_state` says what is exact."""
        load_state(self.model, f"{directory}/{CRITIC}", self._ranks)
        apply_settings(self.model.optimizer, self._config.critic.optimizer, self.model.lr_scheduler)

    @property
    def _text_config(self) -> Any:
        return self.model.model_config.hf_config.get_text_config()

    def _values(self, rows: Sequence[TokenRow]) -> Rows:
        """Return the value before each response token of all rows, on all ranks."""
        slots = deal_to(self.model, rows, range(len(rows)))
        values = gather_rows(self._ranks, forward_values(self.model, rows, slots))
        return [values[number] for number in range(len(rows))]

    def _learn(self, step: TrainingStep, values: Rows, returns: Rows, number: int) -> Metrics:
        parts = split_updates(step.rollouts, [], critic_mini_batches(self._config))
        parts *= critic_epochs(self._config)
        loss = ValueLoss(critic_config(self._config), step.figures, 1 / max(len(parts), 1))
        columns = {"values": dict(enumerate(values)), "returns": dict(enumerate(returns))}

        def add_gradients(part: UpdateRows) -> None:
            self._updates.add_gradients(
                loss, step.rollouts, part.rollouts, columns, temperature=1.0, calculate_entropy=False
            )

        return self._updates.run(parts, add_gradients, number)

    def _companions(self) -> dict[str, bytes]:
        config, model = self._config.model, self.model.model_config
        own = {"architectures": model.architectures, **VALUE_HEAD}
        return companions(model.path, config.dtype, code=config.trust_remote_code, changes=own)
