"""The job's keys as verl's configurations. docs/training-engines.md has the table."""

from typing import Any

import transformers
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.sections import LoraSection
from syncd.jobfile.trainer_sections import AlgorithmSection, OptimizerSection
from trainer.config.algorithms import OWN_LOSS, clip_bounds, find_loss
from trainer.config.critic import critic_path
from trainer.config.model_files import read_model_config
from trainer.config.schedule import CONSTANT, COSINE

VALUE_HEAD = {"num_labels": 1, "classifier_dropout": 0.0}
"""What makes a token classification of transformers a critic, in its config."""

VALUE_HEAD_NAME = "score."
"""How the names of that head's tensors begin; a critic that starts from a policy has none of them."""


def model_config(config: JobFile) -> HFModelConfig:
    return HFModelConfig(
        path=config.model.path,
        load_tokenizer=False,
        trust_remote_code=config.model.trust_remote_code,
        enable_gradient_checkpointing=config.model.gradient_checkpointing,
        use_remove_padding=config.engine.packing,
        override_config={"attn_implementation": config.model.attn_implementation},
        **_lora_settings(config.model.lora),
    )


def _lora_settings(section: LoraSection) -> dict[str, Any]:
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


def critic_model_config(config: JobFile) -> HFModelConfig:
    """Return where the critic's first weights are: the same kind of model with one number for each token.

    verl has its own loader of critics, for `model_type="value_model"`, which knows flash attention alone. Its loader
    of other models takes any class that the config names, and the attention that it is given.
    """
    path = critic_path(config)
    kind = str(read_model_config(path, "critic.path").get("model_type"))
    architecture = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(kind, "")
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not issubclass(model_class, GenericForTokenClassification):
        text = f'transformers has no decoder with a number for each token of the model type "{kind}"'
        hint = "critic.path names a model of another kind with the same tokens"
        raise ConfigError(text, path=path, hint=hint)
    return HFModelConfig(
        path=path,
        load_tokenizer=False,
        trust_remote_code=config.model.trust_remote_code,
        enable_gradient_checkpointing=config.model.gradient_checkpointing,
        use_remove_padding=config.engine.packing,
        override_config={
            "attn_implementation": config.model.attn_implementation,
            "architectures": [architecture],
            **VALUE_HEAD,
        },
    )


def engine_config(config: JobFile, device: str, *, forward_only: bool = False) -> FSDPEngineConfig:
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
        "use_remove_padding": engine.packing,
        "use_torch_compile": False,
        "param_offload": engine.offload_params and elsewhere,
        "optimizer_offload": engine.offload_optimizer and elsewhere,
        "forward_only": forward_only and elsewhere,
        "seed": config.job.seed,
    }
    return FSDPEngineConfig(**{**settings, **engine.options})


def optimizer_config(section: OptimizerSection, total_steps: int) -> FSDPOptimizerConfig:
    """Return AdamW and its learning rate, whose schedule ends after `total_steps` updates, -1 for no end."""
    return FSDPOptimizerConfig(
        lr=section.lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip_grad=section.clip_grad,
        lr_warmup_steps=section.warmup_steps,
        lr_scheduler_type=COSINE if section.schedule == COSINE else CONSTANT,  # linear: `models._falling`
        min_lr_ratio=section.min_lr_ratio,
        total_training_steps=total_steps,
    )


def critic_config(config: JobFile) -> FSDPCriticConfig:
    """Return the value loss: a mean over the tokens of an update."""
    return FSDPCriticConfig(
        strategy=config.engine.strategy,
        ppo_micro_batch_size_per_gpu=config.engine.micro_batch_size,
        cliprange_value=config.critic.clip_range,
        loss_agg_mode="token-mean",
    )


def actor_config(config: JobFile, algorithm: AlgorithmSection, horizon: int) -> FSDPActorConfig:
    """Return the policy loss; `seq-mean-token-sum-norm` divides by `horizon` unless options say by what."""
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
        "use_kl_loss": False,  # PolicyLoss adds the KL loss and the entropy bonus
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
