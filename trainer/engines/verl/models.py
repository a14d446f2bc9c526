"""Builds the trained model and the reference model as engines of verl."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from transformers import get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging
from verl.trainer.config import CheckpointConfig
from verl.workers.config import EngineConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine import EngineRegistry

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.trainer_sections import OptimizerSection
from trainer.config.critic import critic_path
from trainer.config.lora import PLACE
from trainer.config.schedule import critic_schedule_steps, schedule_steps
from trainer.config.strategies import strategy_of
from trainer.engines.verl import settings
from trainer.engines.verl.refusals import refusals
from trainer.whole_models import whole_models

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


def build_model(config: JobFile, device: str, *, forward_only: bool = False) -> Model:
    lora = config.model.lora
    with (
        refusals(config.model.path, has_adapters=lora.rank > 0),
        whole_models(),
        _whole_adapter(lora.adapter),
    ):
        return _policy(config, device, forward_only=forward_only)


@contextlib.contextmanager
def _whole_adapter(path: str) -> Iterator[None]:
    """Refuse an adapter that lacks a tensor of the model's layers, of which peft only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            yield
        except UserWarning as error:
            name = str(error).partition("'")[2].partition("'")[0]
            raise ConfigError(
                f"the adapter to start from has no tensor {name}", path=path, hint=PLACE
            ) from error


def _policy(config: JobFile, device: str, *, forward_only: bool) -> Model:
    strategy = strategy_of(config)
    if strategy is not None:
        build: Callable[..., Model] = resolve_name(strategy.model)
        return build(config, forward_only=forward_only)
    model = build_part(
        "language_model",
        config.engine.strategy,
        settings.model_config(config),
        settings.engine_config(config, device, forward_only=forward_only),
        settings.optimizer_config(config.algorithm.optimizer, schedule_steps(config)),
    )
    return _falling(model, config.algorithm.optimizer, schedule_steps(config))


def build_critic(config: JobFile, device: str) -> Model:
    # torch says so of any head with a bias; nothing changes its output in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    with refusals(critic_path(config)), whole_models(new=settings.VALUE_HEAD_NAME):
        model = build_part(
            "value_model",
            config.engine.strategy,
            settings.critic_model_config(config),
            settings.engine_config(config, device),
            settings.optimizer_config(config.critic.optimizer, critic_schedule_steps(config)),
        )
    return _falling(model, config.critic.optimizer, critic_schedule_steps(config))


def _falling(model: Model, section: OptimizerSection, end: int) -> Model:
    """Return the model with a rate that falls in a straight line if that is asked for, which verl's FSDP cannot."""
    if section.schedule == "linear" and model.optimizer is not None:
        linear: Any = get_linear_schedule_with_warmup
        scheduler = linear(model.optimizer, section.warmup_steps, end)
        model.lr_scheduler = model.checkpoint_manager.lr_scheduler = scheduler
    return model


def build_part(
    kind: str,
    strategy: str,
    model_config: HFModelConfig,
    engine_config: EngineConfig,
    optimizer_config: OptimizerConfig,
) -> Model:
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
    return model


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
