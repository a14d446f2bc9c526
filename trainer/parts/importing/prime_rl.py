"""The keys of prime-rl: of the file that its `rl` command takes."""

import re
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
    one_of,
    unneeded,
    unsupported,
)
from trainer.parts.importing.tasks import AGENTS

_ORCHESTRATOR = "orchestrator"
_TRAINER = "trainer"
_SAMPLING = (f"{_ORCHESTRATOR}.train.sampling", f"{_ORCHESTRATOR}.sampling")
_MODEL = f"{_TRAINER}.model"
_GROUP = (f"{_ORCHESTRATOR}.group_size", f"{_ORCHESTRATOR}.rollouts_per_example")
_LEVEL = ("max_async_level", f"{_ORCHESTRATOR}.max_async_level")
_SOURCE = f"{_ORCHESTRATOR}.train.source"
_FILTERS = ("filters", "pre_batch_filters", "post_batch_filters")
_FILTER = re.compile(rf"{re.escape(_ORCHESTRATOR)}\.({'|'.join(_FILTERS)})\.")
_WHOLE = "the whole sequence length of a server"


def _first(given: Given, keys: tuple[str, ...], default: Any = None) -> Any:
    return next((given.get(key) for key in keys if key in given), default)


def _groups(given: Given) -> dict[str, Any]:
    size = as_whole(_first(given, _GROUP, 1))
    what = "orchestrator.batch_size by its group_size"
    groups = objective.whole_ratio(given.whole(f"{_ORCHESTRATOR}.batch_size"), size, what)
    return {"data.groups": groups, "data.group_size": size}


def _advantage(given: Given) -> dict[str, Any]:
    """Return that rewards are taken against the mean of their group, and not divided."""
    is_default = given.get(f"{_ORCHESTRATOR}.advantage.type") == "default"
    return {"algorithm.norm_advantage": False if is_default else None}


def _pacing(given: Given) -> dict[str, Any]:
    """Return how far explorers are ahead; 0 is one version for each step."""
    level = as_whole(_first(given, _LEVEL, 1))
    return {"sync.style": "fully_async", "explorer.ahead": level} if level else {"sync.style": "fixed"}


def _schedule(given: Given) -> dict[str, Any]:
    table = f"{_TRAINER}.scheduler"
    style = objective.style_of(given, given.text(f"{table}.type"))
    if style == "linear" and "algorithm.optimizer.schedule" not in given.chosen:
        raise CannotMapError(
            "a rate that is linear falls only at the end there", f"--{objective.OPTIMIZER}.schedule linear"
        )
    warmup = given.whole(f"{table}.warmup_steps", 0 if style == "constant" else 10)
    least = given.number(f"{table}.min_lr", 0.0) / given.number(f"{_TRAINER}.optim.lr", 1e-6)
    return objective.schedule(style, warmup, least=least)


def _betas(given: Given) -> dict[str, Any]:
    return {"algorithm.optimizer.betas": [given.number(f"{_TRAINER}.optim.betas{one}") for one in (1, 2)]}


def _packed(given: Given) -> dict[str, Any]:
    """Return the bound of packed micro-batches: prime-rl fills sequences of this length."""
    length = as_whole(_first(given, (f"{_MODEL}.seq_len", "seq_len"), 2048))
    return {
        "engine.packing": True,
        "engine.options.use_dynamic_bsz": True,
        "engine.options.max_token_len_per_gpu": length,
    }


def _checkpointing(given: Given) -> dict[str, Any]:
    tables = (f"{_MODEL}.ac", f"{_MODEL}.ac_offloading")
    is_on = any(key == table or key.startswith(f"{table}.") for key in given.values for table in tables)
    return {"model.gradient_checkpointing": is_on}


def _resume(value: Any) -> bool:
    if as_whole(value) != -1:
        raise CannotMapError("names a step, and here the newest full checkpoint counts", "--without KEY")
    return True


def _offload(given: Given) -> dict[str, Any]:
    whole, optimizer = (given.flag(f"{_MODEL}.{of}_cpu_offload") for of in ("fsdp", "optim"))
    return {"engine.offload_params": whole, "engine.offload_optimizer": whole or optimizer}


def _targets(value: Any) -> list[str]:
    names = [as_text(one) for one in value]
    if odd := [one for one in names if not one.replace("_", "").isalnum() or one == "experts"]:
        raise CannotMapError(
            f"{', '.join(odd)}: layers are named, by no pattern",
            "--set trainer.model.lora.target_modules=[...]",
        )
    return names


def _max_tokens(given: Given) -> dict[str, Any]:
    names = ("max_completion_tokens", "max_tokens")
    value = _first(given, tuple(f"{table}.{name}" for table in _SAMPLING for name in names))
    return {"explorer.sampling.max_tokens": as_whole(value)}


def _kinds(given: Given) -> dict[str, Any]:
    return {"monitor.kinds": ["wandb"], "monitor.project": given.text("wandb.project", "prime-rl")}


def _environment(given: Given) -> dict[str, Any]:
    """Return the environment of verifiers, if there is one; its `env` table is ours too."""
    table = f"{_SOURCE}.0.env."
    env = {key.removeprefix(table): value for key, value in given.values.items() if key.startswith(table)}
    taskset, kind = (env.pop(name, None) for name in ("taskset.id", "id"))
    others = any(not key.startswith(f"{_SOURCE}.0.") for key in given.values if key.startswith(f"{_SOURCE}."))
    has_lists = any(part.isdigit() for key in env for part in key.split("."))
    if tasks.are_chosen(given) or others or has_lists or not isinstance(taskset, str):
        return {}
    for key, value in env.items():
        if key.endswith("runtime.type") and value != "subprocess":
            raise CannotMapError("environments run on the explorer's host", f"--set {table}{key}=subprocess")
    name = f"verifiers:{kind}+{taskset}" if kind else f"verifiers:{taskset}"
    options = {f"explorer.agent.options.{key}": value for key, value in env.items()}
    return {"explorer.agent.environment": name, **options}


def _filters(given: Given) -> dict[str, Any]:
    """Return that groups without an advantage are replaced; no other filter may be enforced."""
    tables = {key.rpartition(".")[0] for key in given.values if _FILTER.match(key) and key.endswith(".type")}
    replaced = False
    for table in sorted(tables):
        is_zero = given.text(f"{table}.type") == "zero_advantage"
        is_enforced = given.flag(f"{table}.enforce", default=is_zero)
        if is_enforced and not is_zero:
            raise CannotMapError(
                "leaves rollouts out, which is not done here", f"--set {table}.enforce=false"
            )
        replaced |= is_enforced and "pre_batch" in table
    return {"explorer.reward.equal_groups": "drop" if replaced else None}


_ROWS: tuple[Row, ...] = (
    unsupported("prime-rl's losses mask by their own bounds, and none of verl's is the same: choose one",
                f"{_TRAINER}.loss.*", ours=("algorithm.name",),
                instead="--algorithm.name grpo --algorithm.clip_ratio 0.2,"
                f" or your own loss ({DOCS}/engines.md#add-a-policy-loss)"),
    joint((f"{_ORCHESTRATOR}.advantage.type",), ("algorithm.norm_advantage",),
          _advantage,
          "rewards against the mean of their group, not divided"),
    unsupported("advantages are verl's: algorithm.advantage", f"{_ORCHESTRATOR}.advantage.*", off=("default", False),
                ours=("algorithm.advantage",), instead="--algorithm.advantage NAME"),
    mapped("model.name", "model.path", as_text, "a directory; a name on the hub is downloaded first"),
    mapped(f"{_MODEL}.name", "model.path", as_text),
    mapped(f"{_MODEL}.trust_remote_code", "model.trust_remote_code", as_flag),
    mapped("output_dir", "job.dir", as_text, "a directory of its own: not one that prime-rl has written"),
    mapped("max_steps", "trainer.total_steps", as_whole),
    mapped(f"{_TRAINER}.max_steps", "trainer.total_steps", as_whole),
    mapped(f"{_ORCHESTRATOR}.max_steps", "trainer.total_steps", as_whole),
    joint((f"{_ORCHESTRATOR}.batch_size", *_GROUP), ("data.groups", "data.group_size"), _groups,
          "batch_size counts rollouts"),
    unsupported("a step has groups, not tokens", f"{_ORCHESTRATOR}.token_batch_size", off=(),
                instead="--without KEY --set orchestrator.batch_size=ROLLOUTS"),
    joint((f"{_ORCHESTRATOR}.batch_size",), ("explorer.engine.kind",), lambda _: {"explorer.engine.kind": "vllm"},
          "prime-rl's engine is vLLM: explorer.engine.command starts one, explorer.engine.address names one"),
    joint(_LEVEL, ("sync.style", "explorer.ahead"), _pacing, '0 is sync.style = "fixed"'),
    joint((f"{_MODEL}.seq_len", "seq_len"), ("engine.packing", "engine.options.use_dynamic_bsz",
          "engine.options.max_token_len_per_gpu"), _packed,
          "micro-batches are packed to that length; rows longer than it are not cut"),
    unneeded("the bound is that of prompts and responses: explorer.sampling", f"{_ORCHESTRATOR}.seq_len",
             "max_model_len"),
    *(mapped(f"{table}.temperature", "algorithm.temperature", as_number) for table in _SAMPLING),
    joint(tuple(f"{table}.{name}" for table in _SAMPLING for name in ("max_completion_tokens", "max_tokens")),
          ("explorer.sampling.max_tokens",), _max_tokens, "of one response"),
    *(unsupported("rollouts are sampled from the whole distribution, with no other settings",
                  f"{table}.repetition_penalty",
                  off=(1, 1.0)) for table in _SAMPLING),
    *(unsupported("rollouts are sampled from the whole distribution, with no other settings", f"{table}.*", off=(0,))
      for table in _SAMPLING),
    mapped(f"{_TRAINER}.optim.lr", "algorithm.optimizer.lr", as_number),
    mapped(f"{_TRAINER}.optim.weight_decay", "algorithm.optimizer.weight_decay", as_number),
    mapped(f"{_TRAINER}.optim.max_norm", "algorithm.optimizer.clip_grad", as_number),
    joint((f"{_TRAINER}.optim.betas1", f"{_TRAINER}.optim.betas2"), ("algorithm.optimizer.betas",), _betas, "both"),
    unsupported("the optimizer is AdamW", f"{_TRAINER}.optim.type", off=("adamw",)),
    unsupported("AdamW has no such setting", f"{_TRAINER}.optim.*"),
    joint((f"{_TRAINER}.scheduler.type", f"{_TRAINER}.scheduler.warmup_steps", f"{_TRAINER}.scheduler.min_lr"),
          ("algorithm.optimizer.schedule", "algorithm.optimizer.warmup_steps", "algorithm.optimizer.min_lr_ratio"),
          _schedule, "constant or cosine"),
    unneeded("of a linear schedule", f"{_TRAINER}.scheduler.decay_steps"),
    *(mapped(f"{table}ckpt.interval", "trainer.save_interval", as_whole) for table in ("", f"{_TRAINER}.")),
    *(mapped(f"{table}ckpt.keep_last", "trainer.max_checkpoints_to_keep", as_whole) for table in ("",
             f"{_TRAINER}.")),
    *(mapped(f"{table}ckpt.resume_step", "trainer.continue_from_checkpoint", _resume, "-1 alone")
      for table in ("", f"{_TRAINER}.")),
    by_hand("full checkpoints are kept by their number alone; pin one: syncd pin JOB STEP", "ckpt.keep_interval",
            f"{_TRAINER}.ckpt.keep_interval"),
    unneeded("what a checkpoint holds is fixed, and the last step is always saved", "ckpt*", f"{_TRAINER}.ckpt*",
             f"{_ORCHESTRATOR}.ckpt*"),
    *(mapped(f"{table}weight_broadcast.type", "sync.method", one_of(nccl="nccl", filesystem="checkpoint"))
      for table in ("", f"{_TRAINER}.", f"{_ORCHESTRATOR}.")),
    unneeded("where a broadcast meets: sync.address", "weight_broadcast.*", f"{_TRAINER}.weight_broadcast.*",
             f"{_ORCHESTRATOR}.weight_broadcast.*"),
    mapped(f"{_MODEL}.attn", "model.attn_implementation", one_of(sdpa="sdpa", eager="eager",
           flash_attention_2="flash_attention_2", flash_attention_3="flash_attention_3",
           flash_attention_4="flash_attention_4")),
    mapped(f"{_MODEL}.optimization_dtype", "model.dtype", one_of(float32="float32", bfloat16="bfloat16")),
    joint((f"{_MODEL}.ac.*", f"{_MODEL}.ac", f"{_MODEL}.ac_offloading.*", f"{_MODEL}.ac_offloading"),
          ("model.gradient_checkpointing",), _checkpointing, "on with any of these tables"),
    joint((f"{_MODEL}.fsdp_cpu_offload", f"{_MODEL}.optim_cpu_offload"), ("engine.offload_params",
          "engine.offload_optimizer"), _offload, "both, or the optimizer's alone"),
    mapped(f"{_MODEL}.reshard_after_forward", "engine.options.reshard_after_forward", as_flag),
    unsupported("FSDP alone splits a model here; Megatron splits it further", f"{_MODEL}.tp", f"{_MODEL}.cp",
                f"{_MODEL}.ep",
                f"{_MODEL}.dp_replicate", off=(1, "auto"), instead="--without KEY, or --engine.strategy megatron"),
    mapped(f"{_MODEL}.lora.rank", "model.lora.rank", as_whole),
    mapped(f"{_MODEL}.lora.alpha", "model.lora.alpha", as_whole),
    mapped(f"{_MODEL}.lora.target_modules", "model.lora.targets", _targets, "names of layers"),
    unsupported("adapters have no dropout, and no whole layers beside them", f"{_MODEL}.lora.dropout",
                f"{_MODEL}.lora.modules_to_save", off=(0, 0.0)),
    unneeded("one adapter, by the trainer's settings", f"{_ORCHESTRATOR}.model.*"),
    unsupported("models are trained whole, and images are not", f"{_MODEL}.freeze_moe_router", f"{_MODEL}.vlm*",
                "model.vlm*",
                off=(False,)),
    unneeded("speed and memory alone, or names of the same model", f"{_MODEL}.*", "tokenizer.*",
             f"{_TRAINER}.tokenizer.*",
             f"{_ORCHESTRATOR}.tokenizer.*", f"{_ORCHESTRATOR}.renderer.*", f"{_ORCHESTRATOR}.use_*"),
    mapped(f"{_ORCHESTRATOR}.eval.interval", "explorer.evaluation.every", as_whole, "in versions, which are steps"),
    unsupported("algorithm, sampling and group size are those of all environments", f"{_SOURCE}.*.algo.*",
                f"{_SOURCE}.*.sampling.*", f"{_SOURCE}.*.group_size"),
    unsupported("environments of verifiers are those of its v1 API, not of v0", f"{_SOURCE}.*.legacy.*",
                instead="--explorer.agent.environment verifiers:NAME, of an environment that was ported",
                ours=AGENTS),
    by_hand("environments run on the explorer's host, with verifiers 0.4; several have an explorer with a file each"
            f" ({DOCS}/agents.md#environments-of-verifiers)", f"{_SOURCE}.*"),
    joint((f"{_SOURCE}.*.env.*",), ("explorer.agent.environment", "explorer.agent.options"), _environment,
          "of one source, with its taskset's id; options are the same table"),
    by_hand(f"explorer.agent.environment, with explorer.agent.options: verifiers:NAME ({DOCS}/agents.md"
            "#environments-of-verifiers)", f"{_ORCHESTRATOR}.env.*", f"{_ORCHESTRATOR}.train.env.*"),
    by_hand("held-out tasks are explorer.evaluation.tasks, which a function or a command as agent plays; environments"
            f" play none ({DOCS}/evaluation.md#with-agents)", f"{_ORCHESTRATOR}.eval.*"),
    by_hand("data.max_age: the age up to which an experience counts", f"{_ORCHESTRATOR}.max_off_policy_steps"),
    by_hand(f"explorer.teacher with algorithm.teacher_coef: {DOCS}/engines.md#a-teacher",
            f"{_ORCHESTRATOR}.teacher_model.*",
            "teacher_inference.*"),
    joint(tuple(f"{_ORCHESTRATOR}.{name}.*.{key}" for name in _FILTERS for key in ("type", "enforce")),
          ("explorer.reward.equal_groups",), _filters,
          "zero_advantage in pre_batch_filters: such groups are replaced"),
    unneeded("of filters that only count", *(f"{_ORCHESTRATOR}.{name}.*" for name in _FILTERS)),
    unsupported("groups of rewards that are all the same are replaced, whatever the reward is"
                f" ({DOCS}/tasks.md#difficulty)", f"{_ORCHESTRATOR}.buffer.online_difficulty_filtering",
                off=(False,), instead="--explorer.reward.equal_groups drop", ours=("explorer.reward.equal_groups",)),
    unneeded("job.seed is for everything", f"{_ORCHESTRATOR}.buffer.seed"),
    unsupported(f"tasks are taken by their rewards in one way ({DOCS}/tasks.md#difficulty)",
                f"{_ORCHESTRATOR}.buffer.*", f"{_SOURCE}.*.curriculum.*", off=(0, 0.0),
                instead="--explorer.curriculum.enabled true", ours=("explorer.curriculum.enabled",)),
    unsupported("rollouts are not left out, and staleness is bounded by explorer.ahead and data.max_age",
                f"{_ORCHESTRATOR}.verification.*", f"{_ORCHESTRATOR}.strict_async_level",
                off=(False, True, 0, 0.0)),
    unsupported(f"distillation is explorer.teacher ({DOCS}/engines.md#a-teacher), and other estimators are verl's",
                f"{_ORCHESTRATOR}.algo.*", off=("grpo",), instead="--without KEY --algorithm.advantage NAME",
                ours=("algorithm.advantage", "algorithm.teacher_coef")),
    mapped(f"{_ORCHESTRATOR}.seed", "job.seed", as_whole),
    unneeded("how rollouts are requested and limited: explorer.engine", f"{_ORCHESTRATOR}.*"),
    joint(("wandb.project", f"{_TRAINER}.wandb.project", "wandb"), ("monitor.kinds", "monitor.project"), _kinds,
          "wandb"),
    mapped("wandb.name", "job.name", as_text),
    mapped("wandb.group", "monitor.group", as_text),
    unneeded("logging, profiling, and where things run", "wandb.*", "log.*", f"{_TRAINER}.*", "deployment.*",
             "slurm.*",
             "inference*", "clean_output_dir", "dry_run", "env_server_base_port", "heartbeat.*", "monitors.*",
             "experimental.*"),
    unsupported("a benchmark's data is not trained on", "bench", off=(False,)),
    unneeded(_WHOLE, "model.max_model_len"),
)  # fmt: skip

PRIME_RL = Table(
    "prime-rl",
    "prime-rl",
    "0.8",
    _ROWS,
    {
        f"{_TRAINER}.loss.type": "default", f"{_ORCHESTRATOR}.advantage.type": "default", "output_dir": "outputs",
        f"{_ORCHESTRATOR}.batch_size": 128, "max_async_level": 1, "seq_len": 2048, f"{_TRAINER}.optim.lr": 1e-6,
        f"{_TRAINER}.optim.weight_decay": 0.01, f"{_TRAINER}.optim.betas1": 0.9, f"{_TRAINER}.optim.betas2": 0.999,
        f"{_TRAINER}.scheduler.type": "constant", f"{_MODEL}.attn": "flash_attention_2", f"{_ORCHESTRATOR}.seed": 42,
    },
    (f"{_ORCHESTRATOR}.",),
)  # fmt: skip
"""prime-rl's keys, of the one file that has all parts."""
