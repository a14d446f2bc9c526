"""The job's keys as verl's configurations. docs/engines.md has the table."""

from collections.abc import Mapping
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import kl_penalty
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)

from syncd.errors import ConfigError
from trainer.config.algorithms import AGGREGATIONS, Loss, clip_bounds, find_loss, loss_names
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.config.options import algorithm_problems, engine_problems
from trainer.engines.verl.checks import known, refuse_first, schedule_steps

_KL_TYPES = ("low_var_kl", "kl", "abs", "mse", "k1", "k2", "k3", "k1+", "k3+")
_UNSUPPORTED = {
    "geo_mean": "geo_mean would depend on how rows are dealt to ranks",
    "bypass_mode": 'bypass_mode is algorithm.old_logprobs = "rollout" with another loss',
}
"""Losses of verl that are not supported, with the reason."""


def model_config(config: JobConfig) -> HFModelConfig:
    """Return where the model is and how it is loaded."""
    return HFModelConfig(
        path=config.model.path,
        load_tokenizer=False,
        trust_remote_code=config.model.trust_remote_code,
        enable_gradient_checkpointing=config.model.gradient_checkpointing,
        use_remove_padding=False,
        override_config={"attn_implementation": config.model.attn_implementation},
    )


def engine_config(config: JobConfig, device: str, *, forward_only: bool = False) -> FSDPEngineConfig:
    """Return how the model is spread and in what it computes.

    Raises:
        ConfigError: `engine.options` has what verl has not.
    """
    engine = config.engine
    refuse_first(engine_problems(engine))
    precision = {"param_dtype": engine.compute_dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"}
    elsewhere = device != "cpu"  # there is other memory to keep things in
    settings: dict[str, Any] = {
        "strategy": engine.strategy,
        "model_dtype": config.model.dtype,
        "mixed_precision": precision,
        "micro_batch_size_per_gpu": engine.micro_batch_size,
        "infer_micro_batch_size_per_gpu": engine.infer_micro_batch_size,
        "use_dynamic_bsz": False,
        "use_remove_padding": False,
        "use_torch_compile": False,
        "param_offload": engine.offload_params and elsewhere,
        "optimizer_offload": engine.offload_optimizer and elsewhere,
        "forward_only": forward_only and elsewhere,
        "seed": config.job.seed,
    }
    return FSDPEngineConfig(**{**settings, **engine.options})


def optimizer_config(config: JobConfig) -> FSDPOptimizerConfig:
    """Return AdamW and its learning rate."""
    optimizer = config.algorithm.optimizer
    return FSDPOptimizerConfig(
        lr=optimizer.lr,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        lr_warmup_steps=optimizer.warmup_steps,
        lr_scheduler_type=optimizer.schedule,
        total_training_steps=schedule_steps(config),
    )


def checkpoint_config() -> CheckpointConfig:
    """Return what a full checkpoint has; weights for explorers are written elsewhere."""
    contents = ["model", "optimizer", "extra"]
    return CheckpointConfig(save_contents=contents, load_contents=contents)


def actor_config(config: JobConfig, algorithm: AlgorithmSection, horizon: int) -> FSDPActorConfig:
    """Return the policy loss.

    Args:
        config: The job's file.
        algorithm: Its algorithm, resolved.
        horizon: What `seq-mean-token-sum-norm` divides by, unless `algorithm.options` has a `loss_scale_factor`.

    Raises:
        ConfigError: verl has no such loss, or `algorithm.options` has what verl has not.
    """
    _check_kl_type(algorithm.kl_type)
    mode = algorithm.loss_agg_mode or _loss_of(algorithm.loss).mode
    _check_mode(mode)
    refuse_first(algorithm_problems(algorithm))
    options = dict(algorithm.options)
    settings: dict[str, Any] = {
        "strategy": config.engine.strategy,
        "rollout_n": config.data.group_size,
        "ppo_micro_batch_size_per_gpu": config.engine.micro_batch_size,
        "policy_loss": _policy_loss(algorithm.loss, options.pop("policy_loss", {})),
        "loss_agg_mode": mode,
        "loss_scale_factor": horizon,
        "entropy_coeff": algorithm.entropy_coeff,
        "use_kl_loss": algorithm.kl_coef > 0,
        "kl_loss_coef": algorithm.kl_coef,
        "kl_loss_type": algorithm.kl_type,
    }
    if bounds := clip_bounds(algorithm):
        settings |= {"clip_ratio_low": bounds[0], "clip_ratio_high": bounds[1]}
    try:
        return FSDPActorConfig(**{**settings, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"verl refuses the algorithm: {error}") from error


def entropy_in_updates(algorithm: AlgorithmSection) -> bool:
    """Say whether updates compute the entropy with its gradient, which takes memory for each token and word."""
    return algorithm.entropy_coeff != 0 or bool(algorithm.options.get("calculate_entropy"))


def _loss_of(name: str) -> Loss:
    if name in _UNSUPPORTED:
        raise ConfigError(
            _UNSUPPORTED[name], hint=f"algorithm.loss is one of {', '.join(sorted(loss_names()))}"
        )
    loss = find_loss(name)
    if loss is None:
        hint = known("algorithm.loss", name, sorted(loss_names()))
        raise ConfigError(f"no policy loss is called {name!r}", hint=hint)
    return loss


def _policy_loss(loss: str, options: Mapping[str, Any]) -> PolicyLossConfig:
    """Return verl's table; the weights of a rollout correction come with the batch (corrections.py)."""
    own = {name: value for name, value in options.items() if name != "rollout_correction"}
    return PolicyLossConfig(loss_mode=loss, **own)


def _check_kl_type(name: str) -> None:
    try:
        kl_penalty(torch.zeros(1), torch.zeros(1), name)
    except NotImplementedError as error:
        hint = known("algorithm.kl_type", name, _KL_TYPES)
        raise ConfigError(f"verl has no KL estimator {name!r}", hint=hint) from error


def _check_mode(name: str) -> None:
    if name not in AGGREGATIONS:
        hint = known("algorithm.loss_agg_mode", name, sorted(AGGREGATIONS))
        raise ConfigError(f"verl cannot aggregate losses by {name!r}", hint=hint)
