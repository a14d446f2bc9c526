"""Checks what `engine.strategy = "megatron"` takes. Pure functions over a configuration, no torch.

`tests/parts/megatron/test_megatron_options.py` compares these tables with verl itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from trainer.config.algorithms import SFT
from trainer.config.options import (
    ENGINE_REFUSED,
    FIXED_HERE,
    Accept,
    is_flag,
    is_whole,
    option_problems,
)

MEGATRON = "megatron"  # the strategy that splits a model by megatron-core

MEGATRON_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
"""The options that say into how many parts megatron-core splits a model."""

MEGATRON_ELSEWHERE: Mapping[str, str] = {
    "strategy": "engine.strategy", "dtype": "engine.compute_dtype", "param_offload": "engine.offload_params",
    "optimizer_offload": "engine.offload_optimizer", "seed": "job.seed",
    "micro_batch_size_per_gpu": "engine.micro_batch_size",
    "infer_micro_batch_size_per_gpu": "engine.infer_micro_batch_size", "forward_only": FIXED_HERE,
    "use_remove_padding": "engine.packing", "use_mbridge": FIXED_HERE,
    "vanilla_mbridge": FIXED_HERE,
}  # fmt: skip
"""Fields of verl's McoreEngineConfig with the key that sets each."""

_FROM_MODEL = "weights start from model.path"
_AS_WRITTEN = "a training state is resumed as it was written"

MEGATRON_REFUSED: Mapping[str, str] = {
    "use_dist_checkpointing": _FROM_MODEL,
    "dist_checkpointing_path": _FROM_MODEL,
    "dist_checkpointing_prefix": _FROM_MODEL,
    "dist_ckpt_optim_fully_reshardable": _AS_WRITTEN,
    "distrib_optim_fully_reshardable_mem_efficient": _AS_WRITTEN,
    "use_megatron_fsdp": "its training state has another format",
    "dynamic_context_parallel": "which rank computes which rows is decided here",
    "max_seqlen_per_dp_cp_rank": "only dynamic_context_parallel reads it",
    "full_determinism": "verl's Megatron engine does not read it",
    "use_fused_kernels": "its kernels were never run with it",
    "router_replay": ENGINE_REFUSED["router_replay"],
    "qat": ENGINE_REFUSED["qat"],
}
"""Other fields of it that would do nothing, or that cannot work here, with the reason."""


def _settings(*fixed: str) -> Accept:
    """Accept a table of settings by megatron-core's names, without those that have a key of their own here."""
    return lambda value: isinstance(value, Mapping) and not set(value) & set(fixed)


_ROUTERS = tuple({"moe_config": {"freeze_moe_router": flag}} for flag in (True, False))

OF_MEGATRON: Mapping[str, Accept] = {
    **dict.fromkeys(MEGATRON_SIZES, is_whole),
    "sequence_parallel": is_flag,
    "use_distributed_optimizer": is_flag,
    "use_dynamic_bsz": is_flag,
    "max_token_len_per_gpu": is_whole,
    "infer_max_token_len_per_gpu": is_whole,
    "pad_bshd_to_minibatch_max": is_flag,
    "pad_to_length": is_flag,
    "pad_to_length_bucket": is_whole,
    "entropy_from_logits_with_chunking": is_flag,
    "entropy_from_logits_chunk_size": is_whole,
    "override_ddp_config": _settings("use_distributed_optimizer"),
    "override_transformer_config": _settings("sequence_parallel", *MEGATRON_SIZES),
    "override_mcore_model_config": lambda value: value in _ROUTERS,
}
"""The options that verl's Megatron engine reads, with the values that they take."""

_NEEDS: Mapping[str, str] = {
    "max_token_len_per_gpu": "use_dynamic_bsz", "infer_max_token_len_per_gpu": "use_dynamic_bsz",
    "pad_to_length_bucket": "pad_to_length",
    "entropy_from_logits_chunk_size": "entropy_from_logits_with_chunking",
}  # fmt: skip
"""Options that do nothing without another one."""

_TABLE = "engine.options"


def megatron_problems(config: JobFile) -> Iterator[Problem]:
    options = config.engine.options
    for name, value in options.items():
        needed = _NEEDS.get(name)
        if needed is not None and options.get(needed) is not True:
            yield _problem(name, f"does nothing without {_TABLE}.{needed} = true")
        else:
            yield from option_problems(_TABLE, name, value, OF_MEGATRON, MEGATRON_ELSEWHERE, MEGATRON_REFUSED)
    yield from _combinations(options)
    yield from _packing(options, packs=config.engine.packing)
    yield from _others(config)


def _combinations(options: Mapping[str, Any]) -> Iterator[Problem]:
    is_dynamic = options.get("use_dynamic_bsz") is True
    if is_dynamic and "max_token_len_per_gpu" not in options:
        yield _problem("use_dynamic_bsz", "needs a bound", f"set {_TABLE}.max_token_len_per_gpu")
    tensor, stages, chunks, *_ = (options.get(name, 1) for name in MEGATRON_SIZES)
    if chunks != 1 and (stages == 1 or not is_dynamic):
        needs = f"{_TABLE}.pipeline_model_parallel_size above 1 and {_TABLE}.use_dynamic_bsz = true"
        yield _problem("virtual_pipeline_model_parallel_size", f"needs {needs}")
    if options.get("sequence_parallel") is True and tensor == 1:
        needs = f"{_TABLE}.tensor_model_parallel_size above 1"
        yield _problem("sequence_parallel", f"does nothing without {needs}")


def _packing(options: Mapping[str, Any], *, packs: bool) -> Iterator[Problem]:
    if packs and "pad_bshd_to_minibatch_max" in options:
        yield _problem("pad_bshd_to_minibatch_max", "does nothing with engine.packing = true")
    if options.get("pad_to_length") is True and not packs:
        yield _problem("pad_to_length", "does nothing without engine.packing = true")


def _others(config: JobFile) -> Iterator[Problem]:
    model, own = config.model, f'with engine.strategy = "{MEGATRON}"'
    dtypes = {"model.dtype": model.dtype, "engine.compute_dtype": config.engine.compute_dtype}
    for key, value in dtypes.items():
        if value != "bfloat16":
            text = f'{key} = "{value}" is not supported {own}, whose optimizer keeps the weights in float32'
            yield Problem(key, text, f'{key} = "bfloat16"')
    if config.critic.enabled:
        yield Problem("critic.enabled", f"a critic is not supported {own}", 'engine.strategy = "fsdp2"')
    if config.data.sft_ratio > 0 and config.algorithm.name != SFT:
        text = f"examples beside rollouts are not supported {own}"
        yield Problem("data.sft_ratio", text, 'leave it out, or engine.strategy = "fsdp2"')
    if model.attn_implementation != type(model).model_fields["attn_implementation"].default:
        text = f"model.attn_implementation has no effect {own}"
        yield Problem("model.attn_implementation", text, "leave it out")


def _problem(name: str, text: str, hint: str | None = None) -> Problem:
    return Problem(f"{_TABLE}.{name}", f"{_TABLE}.{name} {text}", hint)
