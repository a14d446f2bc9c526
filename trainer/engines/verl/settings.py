"""The job's keys as verl's configurations. docs/engines.md has the table."""

import dataclasses
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, kl_penalty
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)

from syncd.errors import ConfigError
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.engines.verl.checks import check_options, known, schedule_steps

_FIXED = "it is fixed"
_ENGINE_ELSEWHERE = {
    "strategy": "engine.strategy", "model_dtype": "model.dtype", "mixed_precision": "engine.compute_dtype",
    "dtype": "engine.compute_dtype", "param_offload": "engine.offload_params",
    "optimizer_offload": "engine.offload_optimizer", "offload_policy": "engine.offload_params",
    "seed": "job.seed", "micro_batch_size_per_gpu": "engine.micro_batch_size",
    "infer_micro_batch_size_per_gpu": "engine.infer_micro_batch_size", "forward_only": _FIXED,
    "use_remove_padding": _FIXED, "use_torch_compile": _FIXED,
}  # fmt: skip
_ACTOR_ELSEWHERE = {
    "clip_ratio": "algorithm.clip_ratio", "clip_ratio_low": "algorithm.clip_ratio_low",
    "clip_ratio_high": "algorithm.clip_ratio_high", "loss_agg_mode": "algorithm.loss_agg_mode",
    "entropy_coeff": "algorithm.entropy_coeff", "use_kl_loss": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef", "kl_loss_type": "algorithm.kl_type", "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "algorithm.mini_batches", "ppo_micro_batch_size": "engine.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "engine.micro_batch_size", "strategy": "engine.strategy",
    "grad_clip": "algorithm.optimizer.clip_grad", "optim": "algorithm.optimizer", "rollout_n": "data.group_size",
    "engine": "engine.options", "fsdp_config": "engine.options", "model_config": "model",
    "checkpoint": _FIXED, "global_batch_info": _FIXED, "use_remove_padding": _FIXED,
}  # fmt: skip
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL_TYPES = ("low_var_kl", "kl", "abs", "mse", "k1", "k2", "k3", "k1+", "k3+")
_PER_MICRO_BATCH = "geo_mean"
"""A loss of verl that takes the mean of each micro-batch: what is learnt would depend on how rows are dealt."""


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
    check_options("engine.options", engine.options, _names(FSDPEngineConfig), _ENGINE_ELSEWHERE)
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
    found = FSDPEngineConfig(**{**settings, **engine.options})
    if found.use_dynamic_bsz and not found.max_token_len_per_gpu:
        raise ConfigError("use_dynamic_bsz needs a bound", hint="set engine.options.max_token_len_per_gpu")
    return found


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
    _check_mode(algorithm.loss_agg_mode)
    options = dict(algorithm.options)
    check_options("algorithm.options", options, _names(FSDPActorConfig), _ACTOR_ELSEWHERE)
    settings: dict[str, Any] = {
        "strategy": config.engine.strategy,
        "rollout_n": config.data.group_size,
        "ppo_micro_batch_size_per_gpu": config.engine.micro_batch_size,
        "clip_ratio": algorithm.clip_ratio,
        "clip_ratio_low": algorithm.clip_ratio_low or algorithm.clip_ratio,
        "clip_ratio_high": algorithm.clip_ratio_high or algorithm.clip_ratio,
        "policy_loss": _policy_loss(algorithm.loss, options.pop("policy_loss", {})),
        "loss_agg_mode": algorithm.loss_agg_mode,
        "loss_scale_factor": horizon,
        "entropy_coeff": algorithm.entropy_coeff,
        "use_kl_loss": algorithm.kl_coef > 0,
        "kl_loss_coef": algorithm.kl_coef,
        "kl_loss_type": algorithm.kl_type,
    }
    try:
        return FSDPActorConfig(**{**settings, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"verl refuses the algorithm: {error}") from error


def entropy_in_updates(algorithm: AlgorithmSection) -> bool:
    """Say whether updates compute the entropy with its gradient, which takes memory for each token and word."""
    return algorithm.entropy_coeff != 0 or bool(algorithm.options.get("calculate_entropy"))


def _policy_loss(loss: str, options: dict[str, Any]) -> PolicyLossConfig:
    losses = sorted(set(POLICY_LOSS_REGISTRY) - {_PER_MICRO_BATCH})
    if loss == _PER_MICRO_BATCH:
        raise ConfigError(
            f"{loss} would depend on how rows are dealt to ranks", hint='algorithm.loss = "gspo"'
        )
    if loss not in losses:
        raise ConfigError(f"no policy loss is called {loss!r}", hint=known("algorithm.loss", loss, losses))
    check_options(
        "algorithm.options.policy_loss", options, _names(PolicyLossConfig), {"loss_mode": "algorithm.loss"}
    )
    if loss == "dro" and not options.get("dro_beta"):
        raise ConfigError("dro needs a penalty", hint="set algorithm.options.policy_loss.dro_beta")
    return PolicyLossConfig(loss_mode=loss, **options)


def _check_kl_type(name: str) -> None:
    try:
        kl_penalty(torch.zeros(1), torch.zeros(1), name)
    except NotImplementedError as error:
        hint = known("algorithm.kl_type", name, _KL_TYPES)
        raise ConfigError(f"verl has no KL estimator {name!r}", hint=hint) from error


def _check_mode(name: str) -> None:
    if name not in _MODES:
        hint = known("algorithm.loss_agg_mode", name, _MODES)
        raise ConfigError(f"verl cannot aggregate losses by {name!r}", hint=hint)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
