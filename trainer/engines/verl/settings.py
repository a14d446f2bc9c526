"""The job's keys as verl's configurations. docs/engines.md has the table."""

from typing import Any

from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)

from syncd.errors import ConfigError
from syncd.jobfile.sections import LoraSection
from trainer.config.algorithms import OWN_LOSS, clip_bounds, find_loss
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.engines.verl.checks import schedule_steps


def model_config(config: JobConfig) -> HFModelConfig:
    """Return where the model is and how it is loaded."""
    return HFModelConfig(
        path=config.model.path,
        load_tokenizer=False,
        trust_remote_code=config.model.trust_remote_code,
        enable_gradient_checkpointing=config.model.gradient_checkpointing,
        use_remove_padding=False,
        override_config={"attn_implementation": config.model.attn_implementation},
        **_lora_settings(config.model.lora),
    )


def _lora_settings(section: LoraSection) -> dict[str, Any]:
    """Return which adapters are trained, nothing if all weights are."""
    if not section.rank:
        return {}
    targets = section.targets if isinstance(section.targets, str) else list(section.targets)
    return {
        "lora_rank": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": targets,
        "exclude_modules": list(section.exclude) or None,
        "lora_adapter_path": section.adapter or None,
    }


def engine_config(config: JobConfig, device: str, *, forward_only: bool = False) -> FSDPEngineConfig:
    """Return how the model is spread and in what it computes."""
    engine = config.engine
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


def actor_config(config: JobConfig, algorithm: AlgorithmSection, horizon: int) -> FSDPActorConfig:
    """Return the policy loss.

    Args:
        config: The job's file.
        algorithm: Its algorithm, resolved.
        horizon: What `seq-mean-token-sum-norm` divides by, unless `algorithm.options` has a `loss_scale_factor`.

    Raises:
        ConfigError: verl refuses the algorithm.
    """
    mode = algorithm.loss_agg_mode or (find_loss(algorithm.loss) or OWN_LOSS).mode
    options = dict(algorithm.options)
    policy_loss = dict(options.pop("policy_loss", {}))
    policy_loss.pop("rollout_correction", None)  # the weights of a correction come with the batch
    settings: dict[str, Any] = {
        "strategy": config.engine.strategy,
        "rollout_n": config.data.group_size,
        "ppo_micro_batch_size_per_gpu": config.engine.micro_batch_size,
        "policy_loss": PolicyLossConfig(loss_mode=algorithm.loss, **policy_loss),
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
    """Return whether updates compute the entropy with its gradient, which needs memory for each token and word."""
    return algorithm.entropy_coeff != 0 or bool(algorithm.options.get("calculate_entropy"))
