"""The keys of TRL's GRPOConfig, of the training arguments below it, and of its scripts."""

import os
from typing import Any

from syncd.errors import DOCS
from trainer.parts.importing import objective, tasks
from trainer.parts.importing.rows import (
    CannotMapError,
    Given,
    Row,
    Table,
    as_flag,
    as_number,
    as_text,
    as_whole,
    by_hand,
    joint,
    mapped,
    unneeded,
    unsupported,
)

_NO_DUAL_CLIP = 1e9
"""verl clamps a ratio's logarithm at 20, so a bound of more than e^20 never counts."""

_ANY_HOST = "0.0.0.0"  # noqa: S104 - TRL's default, to which nothing is bound here
_SPEED = "speed and memory alone, or how TRL places the model"
_MODES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def _loss(given: Given) -> str:
    """Return verl's loss."""
    kind, level = given.text("loss_type"), given.text("importance_sampling_level")
    if level == "sequence":
        if kind != "grpo":
            raise CannotMapError(
                "is taken for sequences with another mean than GSPO's", "--set loss_type=grpo"
            )
        return "gspo"
    if kind in ("cispo", "sapo"):
        return kind
    if kind not in _MODES:
        instead = "dapo is bnpo over the whole batch: --set loss_type=dapo"
        raise CannotMapError(f"{kind} is not supported", instead)
    return "vanilla"


def _algorithm(given: Given) -> dict[str, Any]:
    return objective.name_of("grpo", _loss(given))


def _aggregation(given: Given) -> dict[str, Any]:
    kind, loss = given.text("loss_type"), _loss(given)
    if loss == "sapo":
        return {}  # its one way is TRL's too
    found = objective.aggregation(loss, _MODES.get(kind, "token-mean"), "loss_type")
    if kind == "dr_grpo":
        found["algorithm.options.loss_scale_factor"] = given.whole("max_completion_length")
    return found


def _clips(given: Given) -> dict[str, Any]:
    low, loss = given.number("epsilon"), _loss(given)
    high = given.number("epsilon_high", low)
    if loss == "cispo":  # TRL bounds the ratio itself, from above alone
        return objective.clips(loss, 10.0, high - 1)
    return objective.clips(loss, low, high)


def _dual_clip(given: Given) -> dict[str, Any]:
    if _loss(given) != "vanilla":
        return {}
    return {"algorithm.options.clip_ratio_c": given.number("delta", _NO_DUAL_CLIP)}


def _temperatures(given: Given) -> dict[str, Any]:
    values = {f"tau_{sign}": given.number(f"sapo_temperature_{sign}") for sign in ("pos", "neg")}
    return objective.options_of(_loss(given), values)


def _scaled(given: Given) -> dict[str, Any]:
    known = {"group": True, True: True, "true": True, "none": False, False: False, "false": False}
    value = given.get("scale_rewards")
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, str | bool) or key not in known:
        raise CannotMapError(
            "scales by something else than each group's deviation", "--set scale_rewards=group"
        )
    return objective.normalised("grpo", by_deviation=known[key])


def _generated(given: Given) -> int:
    """Return the completions of one generation."""
    if "generation_batch_size" in given:
        return given.whole("generation_batch_size")
    return (
        _per_update(given)
        * given.whole("steps_per_generation", given.whole("gradient_accumulation_steps"))
        // (given.whole("gradient_accumulation_steps"))
    )


def _per_update(given: Given) -> int:
    """Return the completions of one update of the optimizer."""
    if "num_processes" not in given:
        raise CannotMapError(
            "is multiplied by the number of processes, which the file does not say", "--set num_processes=N"
        )
    rows = given.whole("per_device_train_batch_size") * given.whole("num_processes")
    return rows * given.whole("gradient_accumulation_steps")


def _groups(given: Given) -> dict[str, Any]:
    what = "completions of a generation by num_generations"
    return {"data.groups": objective.whole_ratio(_generated(given), given.whole("num_generations"), what)}


def _mini_batches(given: Given) -> int:
    return objective.whole_ratio(
        _generated(given), _per_update(given), "completions of a generation by those of an update"
    )


def _updates(given: Given) -> int:
    return _mini_batches(given) * given.whole("num_iterations")


def _length(given: Given) -> dict[str, Any]:
    if given.whole("max_steps") > 0:
        steps = objective.whole_ratio(
            given.whole("max_steps"), _updates(given), "max_steps by the updates of a generation"
        )
        return {"trainer.total_steps": steps}
    return {"explorer.epochs": given.whole("num_train_epochs")}


def _when(given: Given, strategy: str) -> str:
    """Return when something happens; `no` is false where YAML is read."""
    return "no" if given.get(strategy) is False else given.text(strategy)


def _every(given: Given, key: str, strategy: str, ours: str) -> dict[str, Any]:
    """Return an interval in training steps; TRL counts updates."""
    how = _when(given, strategy)
    if how == "no":
        return {ours: 0}
    if how != "steps":
        raise CannotMapError(f"is {how}, and here steps are counted", f"--{ours} STEPS")
    if given.number(key) < 1:
        raise CannotMapError("is a share of the run, and here steps are counted", f"--{ours} STEPS")
    return {
        ours: objective.whole_ratio(
            given.whole(key), _updates(given), f"{key} by the updates of a generation"
        )
    }


def _measured(given: Given) -> dict[str, Any]:
    """Return how evaluations sample: as TRL does in training."""
    if _when(given, "eval_strategy") == "no":
        return {}
    samples = given.whole("num_generations_eval", given.whole("num_generations"))
    return {
        "explorer.evaluation.samples": samples,
        "explorer.evaluation.temperature": given.number("temperature", 1.0),
    }


def _task_sets(given: Given) -> dict[str, Any]:
    """Return the data set's split for training and, if it is measured, the one for tests."""
    name = given.all.get("dataset_name")
    if tasks.are_chosen(given) or not isinstance(name, str):
        return {}
    column = given.text("dataset_prompt_column")
    columns = {"prompt_key": column, "system": given.text("system_prompt"), "chat": bool(column)}
    subset = given.text("dataset_config")
    train, test = (given.text(f"dataset_{split}_split", split) for split in ("train", "test"))
    sets = [tasks.data_set(name, subset=subset, split=train, **columns)]
    if _when(given, "eval_strategy") == "no":
        return {"explorer.task_sets": sets}
    held_out = f"{os.path.basename(name.rstrip('/'))}-{test}"
    sets.append(tasks.data_set(name, name=held_out, subset=subset, split=test, held_out=True, **columns))
    return {"explorer.task_sets": sets, "explorer.evaluation.tasks": f"set:{held_out}"}


def _schedule(given: Given) -> dict[str, Any]:
    warmup = given.number("warmup_steps")
    if given.number("warmup_ratio") and not warmup:
        if given.whole("max_steps") <= 0:
            raise CannotMapError("is a share of steps that the file does not count", "--set warmup_steps=N")
        warmup = int(given.number("warmup_ratio") * given.whole("max_steps"))
    style = objective.style_of(given, given.text("lr_scheduler_type"))
    found = objective.schedule(style, warmup)
    if given.text("lr_scheduler_type") == "constant":
        found["algorithm.optimizer.warmup_steps"] = 0
    return found


def _betas(given: Given) -> dict[str, Any]:
    return {"algorithm.optimizer.betas": [given.number("adam_beta1"), given.number("adam_beta2")]}


def _correction(given: Given) -> dict[str, Any]:
    if not given.flag("use_vllm") or not given.flag("vllm_importance_sampling_correction"):
        return {}
    mode = given.text("vllm_importance_sampling_mode")
    level, _, how = mode.partition("_")
    if how not in ("truncate", "mask") or level not in ("token", "sequence"):
        names = ("vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_correction=False")
        instead = " or ".join(f"--set {one}" for one in names)
        raise CannotMapError(f"{mode} is no correction that is known here", instead)
    table = "algorithm.options.policy_loss.rollout_correction"
    cap = given.number("vllm_importance_sampling_cap")
    threshold = cap if how == "truncate" else f"0_{cap:g}"
    return {f"{table}.rollout_is": level, f"{table}.rollout_is_threshold": threshold}


def _engine(given: Given) -> dict[str, Any]:
    if not given.flag("use_vllm"):
        return {"explorer.engine.kind": "transformers"}
    host = given.text("vllm_server_host")
    has_address = "vllm_server_base_url" in given or (host and host != _ANY_HOST)
    address = given.text("vllm_server_base_url", f"http://{host}:{given.whole('vllm_server_port')}")
    return {"explorer.engine.kind": "vllm", "explorer.engine.address": address if has_address else None}


def _lora(given: Given) -> dict[str, Any]:
    if not given.flag("use_peft"):
        return {}
    targets = given.chosen.get("model.lora.targets", given.get("lora_target_modules"))
    if targets is None:
        raise CannotMapError(
            "leaves the layers to peft, which chooses by the model", "--model.lora.targets all-linear"
        )
    return {
        "model.lora.rank": given.whole("lora_r"),
        "model.lora.alpha": given.whole("lora_alpha"),
        "model.lora.targets": targets,
    }


def _monitors(value: Any) -> list[str]:
    names = [as_text(name) for name in ([value] if isinstance(value, str) else value) if name != "none"]
    if others := set(names) - {"wandb", "tensorboard", "mlflow", "trackio"}:
        raise CannotMapError(
            f"{', '.join(sorted(others))} is not there", "--monitor.kinds '[\"tensorboard\"]'"
        )
    return names


def _dtype(given: Given) -> dict[str, Any]:
    if given.flag("fp16"):
        raise CannotMapError("float16 is not computed in here", "--set fp16=False --set bf16=True")
    return {"engine.compute_dtype": "bfloat16" if given.flag("bf16") else "float32"}


def _model_dtype(value: Any) -> str:
    if value not in ("float32", "bfloat16"):
        raise CannotMapError("is neither float32 nor bfloat16", "--model.dtype float32")
    return as_text(value)


_ROWS: tuple[Row, ...] = (
    joint(("loss_type", "importance_sampling_level"), ("algorithm.name",), _algorithm,
          "grpo, dapo and dr_grpo are grpo with other means; sequence is gspo; cispo, sapo"),
    joint(("loss_type", "max_completion_length"), ("algorithm.loss_agg_mode", "algorithm.options.loss_scale_factor"),
          _aggregation, "grpo: seq-mean-token-mean, dapo: token-mean, dr_grpo: a constant"),
    joint(("epsilon", "epsilon_high"), ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), _clips,
          "cispo's bound is of the ratio itself"),
    joint(("delta",), ("algorithm.options.clip_ratio_c",), _dual_clip,
          "verl's dual clip, which TRL has only with delta"),
    joint(("sapo_temperature_pos", "sapo_temperature_neg"), ("algorithm.options.tau_pos",
          "algorithm.options.tau_neg"),
          _temperatures, "of sapo"),
    joint(("scale_rewards",), ("algorithm.norm_advantage",), _scaled, "group or none"),
    mapped("beta", "algorithm.kl_coef", as_number),
    joint(("beta",), ("algorithm.kl_type",),
          lambda given: {"algorithm.kl_type": "k3" if given.number("beta") else None},
          "TRL's estimator is k3"),
    mapped("num_iterations", "algorithm.epochs", as_whole),
    mapped("num_generations", "data.group_size", as_whole),
    joint(("per_device_train_batch_size", "num_processes", "generation_batch_size", "steps_per_generation",
           "gradient_accumulation_steps", "num_generations"), ("data.groups",), _groups,
          "completions of a generation / num_generations; num_processes is accelerate's"),
    joint(("per_device_train_batch_size", "num_processes", "generation_batch_size", "steps_per_generation",
           "gradient_accumulation_steps"), ("algorithm.mini_batches",),
          lambda given: {"algorithm.mini_batches": _mini_batches(given)}, "updates of one generation"),
    mapped("per_device_train_batch_size", "engine.micro_batch_size", as_whole),
    joint(("max_steps", "num_train_epochs"), ("trainer.total_steps", "explorer.epochs"), _length,
          "TRL counts updates; epochs are passes of each explorer over the tasks"),
    joint(("save_steps", "save_strategy"), ("trainer.save_interval",),
          lambda given: _every(given, "save_steps", "save_strategy", "trainer.save_interval"),
          "in steps, not updates"),
    joint(("eval_steps", "eval_strategy"), ("explorer.evaluation.every",),
          lambda given: _every(given, "eval_steps", "eval_strategy", "explorer.evaluation.every"), "in versions"),
    joint(("eval_strategy", "num_generations_eval", "num_generations", "temperature"),
          ("explorer.evaluation.samples", "explorer.evaluation.temperature"), _measured,
          "TRL evaluates as it samples"),
    mapped("save_total_limit", "trainer.max_checkpoints_to_keep", as_whole),
    mapped("learning_rate", "algorithm.optimizer.lr", as_number),
    mapped("weight_decay", "algorithm.optimizer.weight_decay", as_number),
    mapped("max_grad_norm", "algorithm.optimizer.clip_grad", as_number),
    joint(("adam_beta1", "adam_beta2"), ("algorithm.optimizer.betas",), _betas, "both"),
    joint(("lr_scheduler_type", "warmup_steps", "warmup_ratio"), ("algorithm.optimizer.schedule",
          "algorithm.optimizer.warmup_steps"), _schedule,
          "constant, constant_with_warmup, cosine or linear, TRL's default"),
    unsupported("the schedule takes no other settings", "lr_scheduler_kwargs.*", off=()),
    unsupported("the optimizer is AdamW", "optim", off=("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    unsupported("the optimizer's epsilon is 1e-8", "adam_epsilon", off=(1e-8,)),
    joint(("bf16", "fp16"), ("engine.compute_dtype",), _dtype, "bfloat16 or float32"),
    mapped("dtype", "model.dtype", _model_dtype),
    mapped("torch_dtype", "model.dtype", _model_dtype),
    mapped("model_init_kwargs.dtype", "model.dtype", _model_dtype),
    mapped("model_init_kwargs.torch_dtype", "model.dtype", _model_dtype),
    mapped("model_init_kwargs.attn_implementation", "model.attn_implementation", as_text),
    mapped("attn_implementation", "model.attn_implementation", as_text),
    mapped("trust_remote_code", "model.trust_remote_code", as_flag),
    mapped("model_name_or_path", "model.path", as_text, "a directory; a name on the hub is downloaded first"),
    mapped("output_dir", "job.dir", as_text, "a directory of its own: not one that TRL has written"),
    mapped("run_name", "job.name", as_text),
    mapped("seed", "job.seed", as_whole),
    mapped("report_to", "monitor.kinds", _monitors),
    mapped("project", "monitor.project", as_text),
    mapped("gradient_checkpointing", "model.gradient_checkpointing", as_flag),
    mapped("temperature", "algorithm.temperature", as_number),
    mapped("max_prompt_length", "explorer.sampling.max_prompt_tokens", as_whole, "longer ones are skipped, not cut"),
    mapped("max_completion_length", "explorer.sampling.max_tokens", as_whole),
    mapped("shuffle_dataset", "explorer.shuffle", as_flag),
    joint(("use_vllm", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
          ("explorer.engine.kind", "explorer.engine.address"), _engine,
          "without vLLM transformers; explorer.engine.command starts a server"),
    joint(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
          ("algorithm.options.policy_loss.rollout_correction",), _correction,
          "with use_vllm; a mask is a threshold with the lower bound 0"),
    joint(("use_peft", "lora_r", "lora_alpha", "lora_target_modules"),
          ("model.lora.rank", "model.lora.alpha", "model.lora.targets"), _lora, "with use_peft"),
    unsupported("adapters have no dropout", "lora_dropout", off=(0, 0.0), instead="--set lora_dropout=0"),
    unsupported("no such adapters", "use_dora", "use_rslora", "lora_modules_to_save", "load_in_4bit",
                "load_in_8bit", off=(False,)),
    unsupported("rollouts are sampled from the whole distribution", "top_p", off=(1, 1.0)),
    unsupported("rollouts are sampled from the whole distribution", "top_k", off=(0, -1)),
    unsupported("rollouts are sampled from the whole distribution", "min_p", off=(0, 0.0)),
    unsupported("rollouts are sampled from the whole distribution", "repetition_penalty", off=(1, 1.0)),
    unsupported("rollouts are sampled with no other settings", "generation_kwargs.*", "vllm_structured_outputs_regex",
                "vllm_guided_decoding_regex"),
    unsupported("long responses are learnt like others", "mask_truncated_completions", off=(False,),
                instead="--set mask_truncated_completions=False, and a reward function that takes `truncated`"
                f" ({DOCS}/explorer-run.md#rewards)"),
    unsupported("the reference is the model that training starts from", "sync_ref_model", off=(False,)),
    unneeded("only sync_ref_model reads it", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    unsupported("all learnt tokens count", "top_entropy_quantile", off=(1, 1.0)),
    unsupported("responses are not left out by their divergence", "off_policy_mask_threshold", off=()),
    unsupported("the KL loss is not weighted", "use_bias_correction_kl", off=(False,)),
    unsupported("rewards are added before advantages are computed", "multi_objective_aggregation",
                off=("sum_then_normalize",), instead="--set multi_objective_aggregation=sum_then_normalize"),
    unsupported(f"weights stand beside their functions ({DOCS}/explorer-run.md#rewards)", "reward_weights", off=(),
                instead="--explorer.reward.functions '{ \"package.module:function\" = WEIGHT }'",
                ours=("explorer.reward.functions", "explorer.reward.function")),
    unsupported("models are trained as they are", "disable_dropout", "cast_lm_head_to_fp32", off=(False,)),
    unsupported(f"tools and environments are an agent's ({DOCS}/agents.md), whose turns explorer.gateway.max_turns"
                " bounds", "max_tool_calling_iterations", off=(), instead=tasks.AGENT, ours=tasks.AGENTS),
    unsupported("the chat template takes no arguments here", "chat_template_kwargs.*"),
    unneeded("accelerate's own file, which says how the model is spread; of it an import needs num_processes",
             "config_file"),
    unsupported("another file is read by the command", "config", off=(),
                instead="import that file, with --set KEY=VALUE for the rest"),
    joint(("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "eval_strategy",
           "dataset_prompt_column", "system_prompt"),
          ("explorer.task_sets", "explorer.evaluation.tasks"), _task_sets,
          "the split for tests too, with eval_strategy; a name of dataset_prompt_column makes messages"),
    by_hand(f"each is a table [[explorer.task_sets]] ({DOCS}/tasks.md)", "datasets.*"),
    by_hand("explorer.reward.function: exact_match, math, math_verify or package.module:function;"
            f" explorer.reward.functions: several with weights ({DOCS}/import.md#rewards)",
            "reward_funcs"),
    by_hand("a reward model is a server, which explorer.reward.function asks, and asks again by"
            f" explorer.reward.retries ({DOCS}/explorer-run.md#rewards)", "reward_model_name_or_path"),
    by_hand("resume is by the job's directory; another start is by model.path", "resume_from_checkpoint"),
    unneeded(_SPEED, "gradient_checkpointing_kwargs*", "ds3_gather_for_generation", "deepspeed*", "fsdp*",
             "use_liger_kernel", "use_liger_loss", "torch_compile*", "tf32", "dataloader_*", "remove_unused_columns",
             "use_transformers_paged", "cache_implementation", "accelerator_config*", "ddp_*", "mixed_precision",
             "num_machines", "use_deepspeed", "main_process_port", "per_device_eval_batch_size",
             "device_map", "model_revision", "vllm_*", "lora_task_type", "average_tokens_across_devices"),
    unneeded("logging and the hub, which are others' here", "logging_*", "log_*", "num_completions_to_print",
             "push_to_hub",
             "hub_*", "overwrite_output_dir", "do_train", "do_eval", "disable_tqdm", "save_only_model",
             "save_safetensors",
             "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "data_seed", "wandb_*",
             "trackio_*",
             "eval_on_start", "ignore_data_skip", "dataset_streaming", "include_*", "group_by_length",
             "prediction_loss_only"),
)  # fmt: skip

TRL = Table(
    "trl",
    "TRL",
    "GRPOConfig of 1.0",
    _ROWS,
    {
        "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "scale_rewards": "group",
        "beta": 0.0,
        "delta": _NO_DUAL_CLIP, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "num_iterations": 1,
        "num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1,
        "num_train_epochs": 3, "save_steps": 500, "save_strategy": "steps", "eval_strategy": "no",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "bf16": True, "fp16": False, "seed": 42, "gradient_checkpointing": True, "max_completion_length": 256,
        "use_vllm": False, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_cap": 3.0,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_server_host": _ANY_HOST, "vllm_server_port": 8000,
        "use_peft": False, "lora_r": 16, "lora_alpha": 32,
    },
    ("num_generations", "max_completion_length", "max_prompt_length", "per_device_train_batch_size", "use_vllm",
    "loss_type",
     "reward_funcs", "num_train_epochs"),
)  # fmt: skip
"""TRL's keys, those of the training arguments of transformers among them."""
