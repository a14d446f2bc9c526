"""The keys of verl about the model, how it is spread over ranks, the critic, rollouts, data and the cluster."""

from collections.abc import Callable
from typing import Any

from syncd.errors import DOCS
from trainer.config.algorithms import GAE
from trainer.parts.importing import objective
from trainer.parts.importing.rows import (
    CannotMapError,
    Given,
    Row,
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
from trainer.parts.importing.tasks import AGENT, AGENTS

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_FSDP = f"{_ACTOR}.fsdp_config"
_MEGATRON = f"{_ACTOR}.megatron"
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_ROLLOUT = "actor_rollout_ref.rollout"
_MEGATRON_FILE = "ppo_megatron_trainer"
_STRATEGIES = one_of(fsdp="fsdp", fsdp2="fsdp2", megatron="megatron")
_DTYPES = one_of(fp32="float32", float32="float32", bf16="bfloat16", bfloat16="bfloat16")


def _strategy(given: Given) -> str:
    """Return the strategy: what is given, else that of the file on which the configuration builds."""
    if f"{_ACTOR}.strategy" not in given.values and _MEGATRON_FILE in (given.get("defaults") or ()):
        return "megatron"
    return given.text(f"{_ACTOR}.strategy")


def _is_megatron(given: Given) -> bool:
    return _strategy(given) == "megatron"


def _engine_strategy(given: Given) -> dict[str, Any]:
    return {"engine.strategy": _STRATEGIES(_strategy(given))}


def _fsdp(name: str, ours: str, convert: Callable[[Any], Any], *, off: Any) -> Row:
    """Return the row of an FSDP setting, which counts with FSDP and where it is not verl's default."""

    def convert_row(given: Given) -> dict[str, Any]:
        value = convert(given.get(f"{_FSDP}.{name}"))
        return {} if _is_megatron(given) or value == off else {ours: value}

    return joint((f"{_FSDP}.{name}",), (ours,), convert_row, "with FSDP")


def _split(given: Given) -> dict[str, Any]:
    """Return into how many parts Megatron splits the model; one part needs no key."""
    if not _is_megatron(given):
        return {}
    sizes = {name: given.whole(f"{_MEGATRON}.{name}", 1) for name in _SIZES}
    found: dict[str, Any] = {f"engine.options.{name}": size for name, size in sizes.items() if size > 1}
    splits = sizes["tensor_model_parallel_size"] > 1
    found["engine.options.sequence_parallel"] = (
        given.flag(f"{_MEGATRON}.sequence_parallel", default=True) if splits else None
    )
    dtype = _DTYPES(given.get(f"{_MEGATRON}.dtype", "bfloat16"))
    return {**found, "model.dtype": dtype, "engine.compute_dtype": dtype}


def _ulysses(given: Given) -> dict[str, Any]:
    sizes = {given.whole(f"{table}.ulysses_sequence_parallel_size", 1) for table in (_ACTOR, _FSDP)} - {1}
    if len(sizes) > 1:
        raise CannotMapError("name different sizes", "--engine.options.ulysses_sequence_parallel_size RANKS")
    return objective.split_rows(sizes.pop()) if sizes else {}


def _transformer(given: Given) -> dict[str, Any]:
    table = f"{_MEGATRON}.override_transformer_config."
    if not _is_megatron(given):
        return {}
    return {
        f"engine.options.override_transformer_config.{key.removeprefix(table)}": given.get(key)
        for key in given.values
        if key.startswith(table)
    }


def _offload(of: str, ours: str) -> Row:
    keys = (f"{_FSDP}.{of}", f"{_MEGATRON}.{of}")

    def convert_row(given: Given) -> dict[str, Any]:
        return {ours: given.flag(keys[_is_megatron(given)])}

    return joint(keys, (ours,), convert_row, "of the strategy that is used")


def _lora(given: Given) -> dict[str, Any]:
    lora = "lora." if given.whole(f"{_MODEL}.lora.rank", 0) else "lora_"
    rank = given.whole(f"{_MODEL}.{lora}rank", 0)
    if not rank:
        return {}
    names = "lora." if lora == "lora." else ""
    path = "lora.adapter_path" if names else "lora_adapter_path"
    targets = given.get(f"{_MODEL}.{names}target_modules", "all-linear")
    excluded = given.get(f"{_MODEL}.{names}exclude_modules", [])
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": given.whole(f"{_MODEL}.{lora}alpha", 16 if lora == "lora_" else 32),
        "model.lora.targets": targets,
        "model.lora.exclude": [excluded] if isinstance(excluded, str) else excluded or None,
        "model.lora.adapter": given.text(f"{_MODEL}.{path}") or None,
        "model.lora.publish": "merged" if given.flag(f"{_MODEL}.lora.merge") else None,
    }


def _critic(name: str, ours: str, convert: Callable[[Any], Any]) -> Row:
    """Return the row of a key of the critic, which counts only with gae."""
    key = f"critic.{name}"

    def convert_row(given: Given) -> dict[str, Any]:
        return {ours: convert(given.get(key))} if given.text("algorithm.adv_estimator") == GAE else {}

    return joint((key,), (ours,), convert_row, "with gae")


def _critic_schedule(given: Given) -> dict[str, Any]:
    if given.text("algorithm.adv_estimator") != GAE:
        return {}
    style = given.text("critic.optim.warmup_style", given.text("critic.optim.lr_scheduler_type", "constant"))
    if (
        given.number("critic.optim.lr_warmup_steps", 0) > 0
        or given.number("critic.optim.lr_warmup_steps_ratio", 0) > 0
    ):
        raise CannotMapError(
            "the critic's updates are counted by themselves", "--critic.optimizer.warmup_steps UPDATES"
        )
    return objective.schedule(style, 0, "critic.optimizer")


MODEL_ROWS: tuple[Row, ...] = (
    unsupported("Hydra composes other files into this one", "defaults", "defaults.*",
                off=(["ppo_trainer"], ["ppo_trainer", "_self_"], ["ppo_megatron_trainer"],
                     ["ppo_megatron_trainer", "_self_"]),
                instead="import the whole: add --cfg job --resolve to its command, > whole.yaml"),
    mapped(f"{_MODEL}.path", "model.path", as_text, "a directory; a name on the hub is downloaded first"),
    mapped(f"{_MODEL}.trust_remote_code", "model.trust_remote_code", as_flag),
    mapped(f"{_MODEL}.enable_gradient_checkpointing", "model.gradient_checkpointing", as_flag),
    mapped(f"{_MODEL}.use_remove_padding", "engine.packing", as_flag),
    joint((f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules", f"{_MODEL}.exclude_modules",
           f"{_MODEL}.lora_adapter_path", f"{_MODEL}.lora.rank", f"{_MODEL}.lora.alpha", f"{_MODEL}.lora.merge",
           f"{_MODEL}.lora.target_modules", f"{_MODEL}.lora.exclude_modules", f"{_MODEL}.lora.adapter_path"),
          ("model.lora.rank", "model.lora.alpha", "model.lora.targets", "model.lora.exclude", "model.lora.adapter",
           "model.lora.publish"), _lora, 'lora.merge is publish = "merged"'),
    unsupported("adapters have no dropout", f"{_MODEL}.lora.dropout", off=(0, 0.0)),
    unneeded("Megatron's adapters are not supported, and peft's have their own start", f"{_MODEL}.lora.*"),
    mapped(f"{_MODEL}.override_config.attn_implementation", "model.attn_implementation", as_text),
    unsupported("the model's config is used as it is", f"{_MODEL}.override_config.*",
                instead="change config.json of the model's directory"),
    unsupported("the chat template is the model's", f"{_MODEL}.custom_chat_template", off=(),
                instead="put it into the tokenizer of the model's directory"),
    unsupported("model and tokenizer are one directory", f"{_MODEL}.tokenizer_path", f"{_MODEL}.hf_config_path",
                off=(),
                instead="make one directory of them"),
    unsupported("heads for several tokens are not trained", f"{_MODEL}.mtp.enable", f"{_MODEL}.mtp.enable_train",
                off=(False,)),
    unsupported("code of other packages is not loaded into the model", f"{_MODEL}.external_lib", off=()),
    unneeded("speed and memory alone", f"{_MODEL}.use_shm", f"{_MODEL}.use_liger", f"{_MODEL}.use_fused_kernels",
             f"{_MODEL}.fused_kernel_options.*", f"{_MODEL}.tiled_mlp.*", f"{_MODEL}.mtp.*",
             f"{_MODEL}.enable_activation_offload"),
    joint((f"{_ACTOR}.strategy", "defaults"), ("engine.strategy",), _engine_strategy,
          f"megatron too where {_MEGATRON_FILE} is built upon"),
    _offload("param_offload", "engine.offload_params"),
    _offload("optimizer_offload", "engine.offload_optimizer"),
    _fsdp("model_dtype", "model.dtype", _DTYPES, off="float32"),
    _fsdp("dtype", "engine.compute_dtype", _DTYPES, off="bfloat16"),
    _fsdp("fsdp_size", "engine.options.fsdp_size", as_whole, off=-1),
    _fsdp("reshard_after_forward", "engine.options.reshard_after_forward", as_flag, off=True),
    _fsdp("full_determinism", "engine.options.full_determinism", as_flag, off=False),
    _fsdp("entropy_checkpointing", "engine.options.entropy_checkpointing", as_flag, off=False),
    unsupported("FSDP keeps parameters on the GPU or moves them itself", f"{_FSDP}.offload_policy", off=(False,),
                instead="--engine.offload_params true", ours=("engine.offload_params",)),
    joint((f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_FSDP}.ulysses_sequence_parallel_size"),
          ("engine.options.ulysses_sequence_parallel_size", "model.attn_implementation"), _ulysses,
          "above 1, with flash_attention_2, which is verl's own default"),
    unsupported("weights of quantised training cannot be published", f"{_ACTOR}.qat.enable", f"{_FSDP}.qat.enable",
                f"{_MEGATRON}.qat.enable", off=(False,)),
    unsupported("models are trained whole", f"{_ACTOR}.freeze_vision_tower", off=(False,)),
    unneeded("one seed is for everything: job.seed", f"{_FSDP}.seed"),
    unneeded("speed and memory alone", f"{_FSDP}.forward_prefetch", f"{_FSDP}.use_orig_params",
             f"{_FSDP}.wrap_policy*",
             f"{_FSDP}.use_torch_compile", f"{_FSDP}.pad_to_length*", f"{_FSDP}.entropy_from_logits*",
             f"{_FSDP}.turbo_config.*", f"{_FSDP}.qat.*", f"{_FSDP}.strategy", f"{_FSDP}.forward_only",
             f"{_FSDP}.grad_offload",
             f"{_FSDP}.use_no_sync_for_gradient_accumulation", f"{_FSDP}.mixed_precision*", f"{_ACTOR}.qat.*",
             f"{_ACTOR}.use_torch_compile", f"{_ACTOR}.pad_to_length*", f"{_ACTOR}.entropy_from_logits*",
             f"{_ACTOR}.entropy_checkpointing", f"{_ACTOR}.use_fused_kernels", f"{_ACTOR}.use_prefix_grouper",
             f"{_ACTOR}.use_remove_padding", f"{_ACTOR}.load_weight"),
    joint((*(f"{_MEGATRON}.{name}" for name in _SIZES), f"{_MEGATRON}.sequence_parallel", f"{_MEGATRON}.dtype",
           f"{_ACTOR}.strategy", "defaults"),
          (*(f"engine.options.{name}" for name in _SIZES), "engine.options.sequence_parallel", "model.dtype",
           "engine.compute_dtype"), _split, "with strategy megatron"),
    joint((f"{_MEGATRON}.override_transformer_config.*",), ("engine.options.override_transformer_config",),
          _transformer,
          "with strategy megatron, as they are"),
    unsupported("weights start from model.path", f"{_MEGATRON}.use_dist_checkpointing", off=(False,)),
    unsupported("its training state has another format", f"{_MEGATRON}.use_megatron_fsdp", off=(False,)),
    unneeded("how Megatron loads and places, which is fixed here", f"{_MEGATRON}.*"),
    _critic("optim.lr", "critic.optimizer.lr", as_number),
    _critic("optim.weight_decay", "critic.optimizer.weight_decay", as_number),
    _critic("optim.betas", "critic.optimizer.betas", lambda value: value),
    _critic("optim.clip_grad", "critic.optimizer.clip_grad", as_number),
    _critic("grad_clip", "critic.optimizer.clip_grad", as_number),
    _critic("cliprange_value", "critic.clip_range", as_number),
    _critic("model.path", "critic.path", as_text),
    _critic("ppo_epochs", "critic.epochs", as_whole),
    joint(("critic.optim.lr_scheduler_type", "critic.optim.warmup_style", "critic.optim.lr_warmup_steps",
           "critic.optim.lr_warmup_steps_ratio"), ("critic.optimizer.schedule",), _critic_schedule, "with gae"),
    joint(("trainer.critic_warmup",), ("critic.warmup_steps",),
          lambda given: {"critic.warmup_steps": given.whole("trainer.critic_warmup") or None}, "steps"),
    unneeded("the critic is spread and packed as the policy is, or there is none", "critic.*"),
)  # fmt: skip

OTHER_ROWS: tuple[Row, ...] = (
    mapped(f"{_ROLLOUT}.name", "explorer.engine.kind", one_of(vllm="vllm", sglang="sglang", hf="transformers"),
           "a server: explorer.engine.command starts one, explorer.engine.address names one"),
    unsupported("rollouts are sampled from the whole distribution", f"{_ROLLOUT}.top_k", off=(-1, 0)),
    unsupported("rollouts are sampled from the whole distribution", f"{_ROLLOUT}.top_p", off=(1, 1.0)),
    unsupported("rollouts are sampled", f"{_ROLLOUT}.do_sample", off=(True,)),
    unsupported("a response ends at the end token", f"{_ROLLOUT}.ignore_eos", off=(False,)),
    unsupported(f"several turns and tools are an agent's, in a file of yours ({DOCS}/agents.md)",
                f"{_ROLLOUT}.multi_turn.enable", off=(False,), instead=AGENT, ours=AGENTS),
    unsupported(f"tools and partners of a dialogue are an agent's ({DOCS}/agents.md)",
                f"{_ROLLOUT}.multi_turn.tool_config_path", f"{_ROLLOUT}.multi_turn.function_tool_path",
                f"{_ROLLOUT}.multi_turn.interaction_config_path", "data.tool_config_path", "data.function_tool_path",
                off=(), instead=AGENT, ours=AGENTS),
    unsupported(f"an agent's loop is a function or a command that takes its turns by HTTP ({DOCS}/agents.md)",
                f"{_ROLLOUT}.agent.agent_loop_config_path",
                f"{_ROLLOUT}.agent.default_agent_loop", f"{_ROLLOUT}.agent.custom_async_server.path",
                off=("single_turn_agent",), instead=AGENT, ours=AGENTS),
    unsupported("each group has n rollouts", f"{_ROLLOUT}.over_sample_rate", off=(0, 0.0)),
    unsupported("explorers record no routes", f"{_ROLLOUT}.enable_rollout_routing_replay", off=(False,)),
    unneeded("the agent's own loop; explorer.gateway.max_turns and explorer.gateway.tool_format bound and read it",
             f"{_ROLLOUT}.multi_turn.*"),
    mapped(f"{_ROLLOUT}.val_kwargs.n", "explorer.evaluation.samples", as_whole),
    mapped(f"{_ROLLOUT}.val_kwargs.temperature", "explorer.evaluation.temperature", as_number, "0 is greedy"),
    unneeded("verl validates at val_kwargs.temperature, whatever it says", f"{_ROLLOUT}.val_kwargs.do_sample"),
    by_hand("evaluations draw from the whole distribution, so figures differ from verl's"
            f" ({DOCS}/evaluation.md#sets)", f"{_ROLLOUT}.val_kwargs.*"),
    unneeded("settings of the engine: arguments of explorer.engine.command, or of the server that you start",
             f"{_ROLLOUT}.*"),
    unneeded("the reference model is spread as the policy is", "actor_rollout_ref.ref.*"),
    unneeded("profiling, and what full checkpoints hold, are fixed here", f"{_ACTOR}.profiler.*",
             f"{_ACTOR}.checkpoint.*",
             "global_profiler.*"),
    unneeded("of random orders that are not used", f"{_ACTOR}.data_loader_seed", f"{_ACTOR}.rollout_n"),
    unneeded("the entropy is measured anyway", f"{_ACTOR}.calculate_entropy", f"{_ACTOR}.calculate_sum_pi_squared"),
    unneeded("Hydra's own", "hydra.*", "*._target_", "_target_"),
    unneeded("there is no Ray", "ray_kwargs.*", "ray_init.*", "trainer.ray_wait_register_center_timeout",
             "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout"),
    unneeded("ranks are started by trainer.nproc, torchrun or srun; explorers have their own GPUs", "trainer.nnodes",
             "trainer.n_gpus_per_node", "trainer.device"),
    unsupported("trainer and explorers are separate processes already", "trainer.v1.trainer_mode", off=("sync",),
                instead="--sync.style fully_async --sync.interval STEPS", ours=("sync.style",)),
    unneeded("read by other modes of the trainer, or how steps move inside it", "trainer.v1.*", "trainer.use_v1",
             "trainer.use_legacy_worker_impl",
             "transfer_queue.*", "skip.*", "async_training.*"),
    unneeded("explorers evaluate the model that training starts from anyway", "trainer.val_before_train"),
    unsupported("a run that only evaluates is explorer bench JOB", "trainer.val_only", off=(False,)),
    unneeded("rows are spread over ranks by length anyway", "trainer.balance_batch"),
    unneeded("one setting keeps both: trainer.max_checkpoints_to_keep", "trainer.max_critic_ckpt_to_keep"),
    unneeded("previews, dumps and other places of checkpoints", "trainer.log_val_generations",
             "trainer.rollout_data_dir",
             "trainer.validation_data_dir", "trainer.default_hdfs_dir", "trainer.del_local_ckpt_after_load",
             "trainer.esi_redundant_time", "trainer.checkpoint_callback_class",
             "trainer.remove_previous_ckpt_in_save"),
    unsupported("a reward model is a server, which explorer.reward.function asks, and asks again by"
                f" explorer.reward.retries ({DOCS}/explorer-run.md#rewards)", "reward_model.enable",
                "reward.reward_model.enable", off=(False,),
                instead="--explorer.reward.function package.module:function", ours=("explorer.reward.function",)),
    by_hand(f"explorer.reward.function calls it itself ({DOCS}/explorer-run.md#rewards)", "sandbox_fusion.url",
            "reward.sandbox_fusion.url"),
    unneeded("of a reward model or sandbox that is not used", "reward_model.*", "reward.*", "sandbox_fusion.*"),
    by_hand("limit of [[explorer.task_sets]] takes the first tasks, verl a random choice unless data.shuffle is false"
            f" ({DOCS}/tasks.md#sources)", "data.train_max_samples"),
    by_hand("explorer.evaluation.limit takes the first tasks, verl a random choice unless data.shuffle is false",
            "data.val_max_samples"),
    unsupported(f"a class that makes data sets is not loaded ({DOCS}/tasks.md#sources)", "data.custom_cls.path",
                off=(), instead="write its rows to Parquet or JSONL: --explorer.tasks FILE",
                ours=("explorer.tasks", "explorer.task_sets", *AGENTS)),
    unsupported(f"tasks are taken in order, shuffled, or by their rewards ({DOCS}/tasks.md#difficulty)",
                "data.sampler.class_path", off=(), instead="--explorer.curriculum.enabled true",
                ours=("explorer.curriculum.enabled", "explorer.shuffle")),
    unsupported("tasks are read once, at the start", "data.datagen.path", off=(),
                instead="--without data.datagen, and its tasks in a file: --explorer.tasks FILE"),
    unsupported("the chat template takes no arguments here", "data.apply_chat_template_kwargs.*",
                instead="put them into the template of the model's directory"),
    unneeded("how verl loads its data set", "data.*"),
)  # fmt: skip
