"""Builds the trained model and the reference model as engines of verl."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from transformers.utils import logging as transformers_logging
from verl.trainer.config import CheckpointConfig
from verl.workers.config import EngineConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine import EngineRegistry

from syncd.errors import ConfigError
from trainer.config.megatron import MEGATRON
from trainer.config.model import JobConfig
from trainer.engines.verl import settings
from trainer.engines.verl.checks import critic_schedule_steps, schedule_steps
from trainer.engines.verl.megatron_model import (
    MegatronModel,
    megatron_engine_config,
    megatron_model_config,
    megatron_optimizer_config,
)

_SAVED = ["model", "optimizer", "extra"]
"""What a full checkpoint has; weights for explorers are written elsewhere."""


class Answering(Protocol):
    """What passes without gradients need of an engine of verl's."""

    @property
    def engine_config(self) -> Any: ...
    def eval_mode(self) -> contextlib.AbstractContextManager[None]: ...
    def infer_batch(self, data: TensorDict) -> dict[str, Any]: ...


class Model(Answering, Protocol):
    """The part of verl.workers.engine.BaseEngine that is used here."""

    module: Any
    optimizer: Any
    lr_scheduler: Any
    checkpoint_manager: Any
    model_config: Any

    def train_mode(self) -> contextlib.AbstractContextManager[None]: ...
    def forward_backward_batch(self, data: TensorDict, loss_function: Any) -> Any: ...
    def optimizer_zero_grad(self) -> None: ...
    def optimizer_step(self) -> float: ...
    def lr_scheduler_step(self) -> float: ...
    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_size(self) -> int: ...
    def is_mp_src_rank_with_outputs(self) -> bool: ...
    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]: ...
    def load_checkpoint(self, local_path: str, *, del_local_after_load: bool) -> None: ...
    def disable_adapter(self) -> contextlib.AbstractContextManager[None]: ...


def build_model(config: JobConfig, device: str, *, forward_only: bool = False) -> Model:
    """Return the model of `model.path`, spread over the ranks, with its optimizer.

    Raises:
        ConfigError: verl or transformers refuse the configuration or the model.
    """
    if config.engine.strategy == MEGATRON:
        return MegatronModel(
            _build(
                "language_model",
                MEGATRON,
                megatron_model_config(config),
                megatron_engine_config(config, forward_only=forward_only),
                megatron_optimizer_config(config.algorithm.optimizer, schedule_steps(config)),
            )
        )
    return _build(
        "language_model",
        config.engine.strategy,
        settings.model_config(config),
        settings.engine_config(config, device, forward_only=forward_only),
        settings.optimizer_config(config.algorithm.optimizer, schedule_steps(config)),
    )


def build_critic(config: JobConfig, device: str) -> Model:
    """Return the critic, spread over the ranks, with its optimizer.

    Raises:
        ConfigError: verl or transformers refuse the configuration or the model.
    """
    # torch says so of any head with a bias; nothing changes its output in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    return _build(
        "value_model",
        config.engine.strategy,
        settings.critic_model_config(config),
        settings.engine_config(config, device),
        settings.optimizer_config(config.critic.optimizer, critic_schedule_steps(config)),
    )


def _build(
    kind: str,
    strategy: str,
    model_config: HFModelConfig,
    engine_config: EngineConfig,
    optimizer_config: OptimizerConfig,
) -> Model:
    try:
        with quiet():
            model: Model = EngineRegistry.new(
                model_type=kind,
                backend=strategy,
                model_config=model_config,
                engine_config=engine_config,
                optimizer_config=optimizer_config,
                checkpoint_config=CheckpointConfig(save_contents=_SAVED, load_contents=_SAVED),
            )
            model.initialize()  # type: ignore[attr-defined]
    except (ValueError, TypeError, AssertionError, ImportError, NotImplementedError, OSError) as error:
        hint = _hint(error, has_adapters=model_config.lora_rank > 0)
        raise ConfigError(f"the model cannot be built: {error}", path=model_config.path, hint=hint) from error
    return model


def _hint(error: Exception, *, has_adapters: bool) -> str | None:
    if isinstance(error, ImportError) and error.name == "trl":
        return (
            "pip uninstall trl: where it is installed, verl imports from it what newer releases do not have"
        )
    return "model.lora.targets names linear layers only" if has_adapters else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress verl's prints and transformers' progress bars; warnings stay."""
    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
