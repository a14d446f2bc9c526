"""The keys of Trinity-RFT."""

from typing import Any

from trainer.config.algorithms import ALGORITHMS
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
    joint,
    mapped,
    one_of,
    unneeded,
    unsupported,
)
from trainer.parts.importing.trinity_other import OTHER_ROWS

_ALGORITHM = "algorithm"
_TYPE = "algorithm.algorithm_type"
_OPTIMIZER = "algorithm.optimizer"
_LOSS_ARGS = "algorithm.policy_loss_fn_args"
_SYNC = "synchronizer"

_TASKSET = "buffer.explorer_input.taskset"
_COLUMNS = {
    "subset": "subset_name", "split": "split", "prompt_key": "format.prompt_key", "answer_key": "format.response_key",
}  # fmt: skip
_ONE_TURN = frozenset(f"{begin}{kind}_workflow" for begin in ("", "async_") for kind in ("simple", "math"))
"""Workflows whose messages are a system prompt and the question."""

_MATH = "math_reward"
"""The reward with which the workflows `math` have a system prompt of their own, if none is given."""

_TYPES = {
    "ppo": ("gae", "vanilla"),
    "grpo": ("grpo", "vanilla"),
    "dapo": ("grpo", "vanilla"),
    "gspo": ("grpo", "gspo"),
    "sapo": ("grpo", "sapo"),
    "rloo": ("rloo", "vanilla"),
    "reinforceplusplus": ("reinforce_plus_plus", "vanilla"),
}
"""verl's estimator and loss by Trinity-RFT's algorithm."""

_REPEATS = {"ppo": 1, "sft": 1, "dapo": 16}
_WITH_KL = frozenset({"ppo", "grpo", "gspo", "sapo", "cispo", "rloo", "reinforceplusplus"})
_CLIPS = {"gspo": (3e-4, 4e-4)}
_MODES = {"gspo": "seq-mean-token-mean"}
_KL_TYPES = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl", "abs": "abs"}


def _kind(given: Given) -> str:
    return given.text(_TYPE).lower()


def is_sft(given: Given) -> bool:
    """Return whether examples alone are learnt."""
    return _kind(given) == "sft"


def _pair(given: Given) -> tuple[str, str]:
    """Return verl's estimator and loss."""
    kind, chosen = _kind(given), ALGORITHMS.get(str(given.chosen.get("algorithm.name")))
    if chosen is not None and kind not in _TYPES:
        return chosen.advantage, chosen.loss
    if kind == "cispo":
        why = "Trinity-RFT's cispo leaves out tokens beyond its bounds, verl's bounds their weights"
        raise CannotMapError(why, "--algorithm.name cispo")
    if kind not in _TYPES:
        raise CannotMapError(
            f"{kind} is not supported", "trainer config algorithms, and --algorithm.name NAME"
        )
    return _TYPES[kind]


def _algorithm(given: Given) -> dict[str, Any]:
    if is_sft(given):
        return {"algorithm.name": "sft"}
    return objective.name_of(*_pair(given))


def _clips(given: Given) -> dict[str, Any]:
    if is_sft(given):
        return {}
    usual, (_, loss) = given.number(f"{_LOSS_ARGS}.clip_range", 0.2), _pair(given)
    low, high = (
        _CLIPS.get(loss, (usual, usual)) if f"{_LOSS_ARGS}.clip_range" not in given else (usual, usual)
    )
    bounds = (
        given.number(f"{_LOSS_ARGS}.clip_range_low", low),
        given.number(f"{_LOSS_ARGS}.clip_range_high", high),
    )
    return objective.clips(loss, *bounds)


def _aggregation(given: Given) -> dict[str, Any]:
    if is_sft(given):
        return {}
    _, loss = _pair(given)
    mode = given.text(
        f"{_LOSS_ARGS}.loss_agg_mode", given.text("algorithm.loss_agg_mode", _MODES.get(loss, "token-mean"))
    )
    return objective.aggregation(loss, mode, f"{_LOSS_ARGS}.loss_agg_mode")


def _options(given: Given) -> dict[str, Any]:
    if is_sft(given):
        return {}
    names = ("clip_ratio_c", "tau_pos", "tau_neg")
    return objective.options_of(_pair(given)[1], {name: given.get(f"{_LOSS_ARGS}.{name}") for name in names})


def _normalised(given: Given) -> dict[str, Any]:
    """Return that advantages are divided by their deviation, as Trinity-RFT's GRPO does."""
    return {} if is_sft(given) else objective.normalised(_pair(given)[0], by_deviation=True)


def _gae(given: Given) -> dict[str, Any]:
    if _kind(given) != "ppo":
        return {}
    return {
        f"algorithm.{name}": given.number(f"algorithm.advantage_fn_args.{name}", 1.0)
        for name in ("gamma", "lam")
    }


def _kl(given: Given) -> dict[str, Any]:
    return _kl_of(given, "kl_loss_fn", "k2" if _kind(given) in _WITH_KL else "none", "kl")


def _reward_kl(given: Given) -> dict[str, Any]:
    return _kl_of(given, "kl_penalty_fn", "none", "reward_kl")


def _kl_of(given: Given, theirs: str, default: str, ours: str) -> dict[str, Any]:
    kind = given.text(f"algorithm.{theirs}", default)
    if kind == "none":
        return {}
    if kind not in _KL_TYPES:
        raise CannotMapError(f"{kind} is not one of {', '.join(_KL_TYPES)}", f"--set algorithm.{theirs}=k2")
    coef = given.number(f"algorithm.{theirs}_args.kl_coef", 0.001)
    return {f"algorithm.{ours}_coef": coef, f"algorithm.{ours}_type": _KL_TYPES[kind]}


def _entropy(given: Given) -> dict[str, Any]:
    if is_sft(given) or given.text("algorithm.entropy_loss_fn", "default") == "none":
        return {}
    if given.text("algorithm.entropy_loss_fn", "default") not in ("default", "basic"):
        raise CannotMapError(
            "is another entropy term than the mean over tokens", "--algorithm.entropy_coeff COEFFICIENT"
        )
    return {"algorithm.entropy_coeff": given.number("algorithm.entropy_loss_fn_args.entropy_coef", 0.0)}


def _old_logprobs(given: Given) -> dict[str, Any]:
    if is_sft(given):
        return {}
    return {
        "algorithm.old_logprobs": "rollout" if given.flag("algorithm.bypass_old_logprobs") else "recompute"
    }


def _repeats(given: Given) -> int:
    return given.whole("algorithm.repeat_times", _REPEATS.get(_kind(given), 2))


def _groups(given: Given) -> dict[str, Any]:
    """Return groups of a step, rollouts of a group, and groups of an explorer's batch where they differ."""
    rows, repeats = given.whole("buffer.train_batch_size", 0), _repeats(given)
    if is_sft(given):
        return {"data.groups": rows or given.whole("buffer.batch_size"), "data.group_size": 1}
    tasks = given.whole("buffer.batch_size")
    what = "buffer.train_batch_size by algorithm.repeat_times"
    groups = objective.whole_ratio(rows, repeats, what) if rows else tasks
    explored = tasks if tasks != groups else None
    return {"data.groups": groups, "data.group_size": repeats, "explorer.groups": explored}


def _clip_grad(given: Given) -> dict[str, Any]:
    key = "trainer.grad_clip" if "trainer.grad_clip" in given else f"{_OPTIMIZER}.clip_grad"
    return {"algorithm.optimizer.clip_grad": given.number(key)}


def _schedule(given: Given) -> dict[str, Any]:
    total = "trainer.total_steps" if "trainer.total_steps" in given else "buffer.total_steps"
    style = given.text(f"{_OPTIMIZER}.warmup_style", given.text(f"{_OPTIMIZER}.lr_scheduler_type"))
    style = objective.style_of(given, style)
    warmup = objective.warmup_updates(
        given, f"{_OPTIMIZER}.lr_warmup_steps", f"{_OPTIMIZER}.lr_warmup_steps_ratio", total, 1
    )
    return objective.schedule(style, warmup, least=given.number(f"{_OPTIMIZER}.min_lr_ratio"))


def _length(given: Given) -> dict[str, Any]:
    steps = [given.whole(key) for key in ("buffer.total_steps", "trainer.total_steps") if key in given]
    if steps:
        return {"trainer.total_steps": min(steps)}
    return {"data.epochs" if is_sft(given) else "explorer.epochs": given.whole("buffer.total_epochs")}


def _interval(given: Given) -> dict[str, Any]:
    values = {given.whole(f"{_SYNC}.{name}sync_interval") for name in ("", "explorer_", "trainer_")
              if f"{_SYNC}.{name}sync_interval" in given}  # fmt: skip
    if len(values) > 1:
        raise CannotMapError("trainer and explorers have one interval here", "--sync.interval STEPS")
    return {"sync.interval": values.pop()}


def _evaluations(given: Given) -> dict[str, Any]:
    what = "explorer.eval_interval by synchronizer.sync_interval"
    every = objective.whole_ratio(
        given.whole("explorer.eval_interval"), given.whole(f"{_SYNC}.sync_interval"), what
    )
    return {} if is_sft(given) else {"explorer.evaluation.every": every}


def _job_dir(given: Given) -> dict[str, Any]:
    parts = [
        given.text("checkpoint_root_dir"),
        given.text("project"),
        given.text("group"),
        given.text("name"),
    ]
    return {"job.dir": "/".join(part for part in parts if part), "job.name": parts[-1]}


def _dynamic(given: Given) -> dict[str, Any]:
    """Return the bound of micro-batches in tokens; Trinity-RFT's own is twice the longest sequence."""
    if not given.flag("trainer.use_dynamic_bsz"):
        return {}
    bound = given.whole("trainer.max_token_len_per_gpu", 0) or 2 * given.whole("model.max_model_len", 0)
    if not bound:
        raise CannotMapError("has no bound in the file", "--set trainer.max_token_len_per_gpu=TOKENS")
    return {"engine.options.use_dynamic_bsz": True, "engine.options.max_token_len_per_gpu": bound}


def _critic_path(given: Given) -> dict[str, Any]:
    is_ppo = _kind(given) == "ppo"
    return {"critic.path": given.text("model.critic_model_path") or None} if is_ppo else {}


def _critic_warmup(given: Given) -> dict[str, Any]:
    return (
        {"critic.warmup_steps": given.whole("trainer.critic_warmup") or None} if _kind(given) == "ppo" else {}
    )


def _lora(given: Given) -> dict[str, Any]:
    table = "model.lora_configs.0"
    if not any(key.startswith(table) for key in given.values):
        return {}
    excluded = given.get(f"{table}.exclude_modules")
    return {
        "model.lora.rank": given.whole(f"{table}.lora_rank", 32),
        "model.lora.alpha": given.whole(f"{table}.lora_alpha", 32),
        "model.lora.targets": given.get(f"{table}.target_modules", "all-linear"),
        "model.lora.exclude": [excluded] if isinstance(excluded, str) else excluded,
        "model.lora.adapter": given.text(f"{table}.path") or None,
    }


def _task_sets(given: Given) -> dict[str, Any]:
    """Return the data set of the tasks, as Trinity-RFT loads it; what is no data set is left to the user."""
    path, kind = given.all.get(f"{_TASKSET}.path"), given.all.get(f"{_TASKSET}.storage_type", "file")
    if is_sft(given) or tasks.are_chosen(given) or not isinstance(path, str) or kind != "file":
        return {}
    keys = {name: given.text(f"{_TASKSET}.{theirs}") for name, theirs in _COLUMNS.items()}
    return {"explorer.task_sets": [tasks.data_set(path, **keys, **_messages(given))]}


def _shuffle(value: Any) -> bool:
    known = {"sequential": False, "shuffle": True}
    if value not in known:
        how = "--explorer.shuffle true, or by their rewards: --explorer.curriculum.enabled true"
        raise CannotMapError("takes tasks by another rule than sequential and shuffle", how)
    return known[value]


def _messages(given: Given) -> dict[str, Any]:
    """Return how a workflow of one turn makes messages of a question; others make their own."""
    workflow = given.get("buffer.explorer_input.default_workflow_type")
    workflow = given.get(f"{_TASKSET}.default_workflow_type", workflow)
    system = given.get(f"{_TASKSET}.format.system_prompt")
    reward = given.get("buffer.explorer_input.default_reward_fn_type", _MATH)
    has_own = "math" in str(workflow) and given.get(f"{_TASKSET}.default_reward_fn_type", reward) == _MATH
    if workflow not in _ONE_TURN or (system is None and has_own):
        return {}
    return {"system": system} if system else {"chat": True}


def _sft_path(given: Given) -> dict[str, Any]:
    return (
        {"data.sft_path": given.get("buffer.trainer_input.experience_buffer.path")} if is_sft(given) else {}
    )


def _ulysses(given: Given) -> dict[str, Any]:
    size = given.whole("trainer.ulysses_sequence_parallel_size")
    return objective.split_rows(size) if size > 1 else {}


def _split(given: Given) -> dict[str, Any]:
    """Return into how many parts Megatron splits the model; one part needs no key."""
    if given.text("trainer.trainer_strategy") != "megatron":
        return {}
    names = [key.rpartition(".")[2] for key in given.all if key.startswith("trainer.megatron.")]
    sizes = {name: given.whole(f"trainer.megatron.{name}", 1) for name in names if name.endswith("_size")}
    found: dict[str, Any] = {f"engine.options.{name}": size for name, size in sizes.items() if size > 1}
    if sizes.get("tensor_model_parallel_size", 1) > 1:
        found["engine.options.sequence_parallel"] = given.flag(
            "trainer.megatron.sequence_parallel", default=True
        )
    return {**found, "model.dtype": "bfloat16"}


_ROWS: tuple[Row, ...] = (
    joint((_TYPE,), ("algorithm.name", "critic.enabled"), _algorithm,
          "ppo (with a critic), grpo, dapo, gspo, sapo, rloo, reinforceplusplus, sft"),
    joint((_TYPE, *(f"{_LOSS_ARGS}.clip_range{end}" for end in ("", "_low", "_high"))),
          ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), _clips, "the algorithm's unless given"),
    joint((_TYPE, f"{_LOSS_ARGS}.loss_agg_mode", "algorithm.loss_agg_mode"), ("algorithm.loss_agg_mode",),
          _aggregation,
          "the same names"),
    joint(tuple(f"{_LOSS_ARGS}.{name}" for name in ("clip_ratio_c", "tau_pos", "tau_neg")), ("algorithm.options",),
          _options,
          "those that the loss reads"),
    joint((_TYPE,), ("algorithm.norm_advantage",), _normalised, "as Trinity-RFT's GRPO"),
    joint((_TYPE, "algorithm.advantage_fn_args.gamma", "algorithm.advantage_fn_args.lam"), ("algorithm.gamma",
          "algorithm.lam"),
          _gae, "with ppo; 1 unless given"),
    joint((_TYPE, "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"), ("algorithm.kl_coef",
          "algorithm.kl_type"), _kl,
          "k2 with 0.001 unless given; none with dapo"),
    joint(("algorithm.kl_penalty_fn", "algorithm.kl_penalty_fn_args.kl_coef"), ("algorithm.reward_kl_coef",
          "algorithm.reward_kl_type"), _reward_kl, "0.001 unless given; none without kl_penalty_fn"),
    joint(("algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.entropy_coef"), ("algorithm.entropy_coeff",),
          _entropy, "0 unless given"),
    joint(("algorithm.bypass_old_logprobs",), ("algorithm.old_logprobs",), _old_logprobs, "true is rollout"),
    joint((_TYPE, "algorithm.repeat_times", "buffer.batch_size", "buffer.train_batch_size"),
          ("data.groups", "data.group_size", "explorer.groups"), _groups,
          "a step has train_batch_size / repeat_times groups"),
    mapped(f"{_OPTIMIZER}.lr", "algorithm.optimizer.lr", as_number),
    mapped(f"{_OPTIMIZER}.weight_decay", "algorithm.optimizer.weight_decay", as_number),
    mapped(f"{_OPTIMIZER}.betas", "algorithm.optimizer.betas"),
    joint(("trainer.grad_clip", f"{_OPTIMIZER}.clip_grad"), ("algorithm.optimizer.clip_grad",), _clip_grad,
          "trainer.grad_clip wins, as there"),
    joint((f"{_OPTIMIZER}.lr_scheduler_type", f"{_OPTIMIZER}.warmup_style", f"{_OPTIMIZER}.lr_warmup_steps",
           f"{_OPTIMIZER}.lr_warmup_steps_ratio", f"{_OPTIMIZER}.min_lr_ratio"),
          ("algorithm.optimizer.schedule", "algorithm.optimizer.warmup_steps", "algorithm.optimizer.min_lr_ratio"),
          _schedule, "constant or cosine"),
    joint(("buffer.total_steps", "trainer.total_steps", "buffer.total_epochs"),
          ("trainer.total_steps", "explorer.epochs", "data.epochs"), _length,
          "epochs are passes of each explorer over the tasks: divide them if there are several"),
    joint(("checkpoint_root_dir", "project", "group", "name"), ("job.dir", "job.name"), _job_dir,
          "a directory of its own: not one that Trinity-RFT has written"),
    mapped("project", "monitor.project", as_text),
    mapped("group", "monitor.group", as_text),
    mapped("continue_from_checkpoint", "trainer.continue_from_checkpoint", as_flag),
    mapped("monitor.monitor_type", "monitor.kinds", lambda value: [as_text(value)]),
    mapped("model.model_path", "model.path", as_text, "a directory; a name on the hub is downloaded first"),
    mapped("model.trust_remote_code", "model.trust_remote_code", as_flag),
    joint(("model.critic_model_path",), ("critic.path",), _critic_path, "with ppo"),
    joint(("trainer.critic_warmup",), ("critic.warmup_steps",), _critic_warmup, "with ppo"),
    mapped("model.max_prompt_tokens", "explorer.sampling.max_prompt_tokens", as_whole,
           "longer ones are skipped, not cut"),
    mapped("model.max_response_tokens", "explorer.sampling.max_tokens", as_whole),
    joint(("model.lora_configs.0.*",), ("model.lora.rank", "model.lora.alpha", "model.lora.targets",
          "model.lora.exclude",
          "model.lora.adapter"), _lora, "one adapter"),
    mapped("model.temperature", "algorithm.temperature", as_number),
    mapped("buffer.explorer_input.taskset.rollout_args.temperature", "algorithm.temperature", as_number),
    joint((f"{_TASKSET}.path", f"{_TASKSET}.storage_type", *(f"{_TASKSET}.{name}" for name in _COLUMNS.values()),
           f"{_TASKSET}.format.system_prompt"), ("explorer.task_sets",), _task_sets,
          "of files; system with simple_workflow and math_workflow"),
    *(mapped(f"{_TASKSET}.{name}_selector.selector_type", "explorer.shuffle", _shuffle, "sequential or shuffle")
      for name in ("task", "data")),
    joint(("buffer.trainer_input.experience_buffer.path",), ("data.sft_path",), _sft_path, "with sft"),
    mapped("explorer.rollout_model.engine_type", "explorer.engine.kind", one_of(
           vllm="vllm", vllm_async="vllm", sglang="sglang", tinker="tinker"),
           "a server: explorer.engine.command starts one, explorer.engine.address names one"),
    joint(("explorer.eval_interval", f"{_SYNC}.sync_interval"), ("explorer.evaluation.every",), _evaluations,
          "in versions"),
    mapped(f"{_SYNC}.sync_method", "sync.method", one_of(nccl="nccl", checkpoint="checkpoint", memory="memory",
           online="nccl",
           offline="checkpoint")),
    mapped(f"{_SYNC}.sync_style", "sync.style", one_of(fixed="fixed", trainer_driven="trainer_driven",
           explorer_driven="explorer_driven", fully_async="fully_async", dynamic_by_trainer="trainer_driven",
           dynamic_by_explorer="explorer_driven")),
    joint(tuple(f"{_SYNC}.{name}sync_interval" for name in ("", "explorer_", "trainer_")), ("sync.interval",),
          _interval,
          "one for both"),
    mapped(f"{_SYNC}.sync_offset", "sync.offset", as_whole),
    mapped(f"{_SYNC}.sync_timeout", "sync.timeout", as_number),
    mapped("trainer.name", "trainer.name", as_text),
    mapped("trainer.trainer_type", "engine.name", one_of(verl="verl", tinker="tinker")),
    mapped("trainer.trainer_strategy", "engine.strategy", one_of(fsdp="fsdp", fsdp2="fsdp2", megatron="megatron")),
    mapped("trainer.save_interval", "trainer.save_interval", as_whole),
    mapped("trainer.save_hf_checkpoint", "trainer.save_hf_checkpoint", one_of(always="always", never="never",
           last="last")),
    mapped("trainer.max_checkpoints_to_keep", "trainer.max_checkpoints_to_keep", as_whole),
    joint(("trainer.use_dynamic_bsz", "trainer.max_token_len_per_gpu", "model.max_model_len"),
          ("engine.options.use_dynamic_bsz", "engine.options.max_token_len_per_gpu"), _dynamic,
          "twice max_model_len unless given"),
    joint(("trainer.ulysses_sequence_parallel_size",), ("engine.options.ulysses_sequence_parallel_size",
          "model.attn_implementation"), _ulysses,
          "above 1, with flash_attention_2, which is verl's own default"),
    mapped("trainer.use_remove_padding", "engine.packing", as_flag),
    mapped("trainer.param_offload", "engine.offload_params", as_flag),
    mapped("trainer.optimizer_offload", "engine.offload_optimizer", as_flag),
    joint(("trainer.trainer_strategy", "trainer.megatron.*"), ("engine.options",), _split, "with strategy megatron"),
    unsupported("parts of an algorithm cannot be exchanged by Trinity-RFT's names", "algorithm.advantage_fn",
                "algorithm.policy_loss_fn", off=("grpo", "ppo", "gspo", "cispo", "sapo", "rloo",
                "reinforceplusplus", "sft"),
                instead="--algorithm.advantage NAME, --algorithm.loss NAME", ours=("algorithm.advantage",
                "algorithm.loss")),
    unneeded("the advantage has no such settings", "algorithm.advantage_fn_args.epsilon"),
    *OTHER_ROWS,
)  # fmt: skip

TRINITY = Table(
    "trinity",
    "Trinity-RFT",
    "0.6",
    _ROWS,
    {
        _TYPE: "ppo", "project": "Trinity-RFT", "name": "rft", "buffer.batch_size": 1, "buffer.total_epochs": 1,
        "algorithm.bypass_old_logprobs": True, f"{_OPTIMIZER}.lr": 1e-6, f"{_OPTIMIZER}.weight_decay": 0.01,
        f"{_OPTIMIZER}.clip_grad": 1.0, f"{_OPTIMIZER}.lr_scheduler_type": "constant",
        f"{_OPTIMIZER}.lr_warmup_steps": -1,
        f"{_OPTIMIZER}.lr_warmup_steps_ratio": 0.0, f"{_OPTIMIZER}.min_lr_ratio": 0.01,
        "monitor.monitor_type": "tensorboard", f"{_SYNC}.sync_method": "nccl", f"{_SYNC}.sync_interval": 1,
        "explorer.eval_interval": 100, "explorer.rollout_model.engine_type": "vllm", "trainer.use_dynamic_bsz": True,
        "trainer.use_remove_padding": True, "trainer.trainer_strategy": "fsdp2",
    },
    ("synchronizer.", "buffer.", _TYPE, "checkpoint_root_dir"),
)  # fmt: skip
"""Trinity-RFT's keys, those of `trainer.trainer_config` not among them."""
