"""Checks the options that are passed to verl. Pure functions over a configuration, no torch.

An option is accepted where it changes what is computed; `tests/trainer/engines/test_verl_options.py` compares these
tables with verl itself.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from syncd.jobfile.problems import Problem, nearest, shown
from syncd.jobfile.trainer_sections import AlgorithmSection, EngineSection
from trainer.config.algorithms import LOSSES, OWN_LOSS, SFT, estimator_and_loss, find_loss, with_published

Accept = Callable[[Any], bool]

FIXED_HERE = "it is fixed"  # what sets an option that nobody can
CORRECTION = "policy_loss.rollout_correction"  # the table of rollout correction in `algorithm.options`

ENGINE_ELSEWHERE: Mapping[str, str] = {
    "strategy": "engine.strategy", "model_dtype": "model.dtype", "mixed_precision": "engine.compute_dtype",
    "dtype": "engine.compute_dtype", "param_offload": "engine.offload_params",
    "optimizer_offload": "engine.offload_optimizer", "offload_policy": "engine.offload_params",
    "seed": "job.seed", "micro_batch_size_per_gpu": "engine.micro_batch_size",
    "infer_micro_batch_size_per_gpu": "engine.infer_micro_batch_size", "forward_only": FIXED_HERE,
    "use_remove_padding": "engine.packing", "use_torch_compile": FIXED_HERE,
}  # fmt: skip
"""Fields of verl's FSDPEngineConfig with the key that sets each."""

_UNTRIED = dict.fromkeys(
    (
        "pad_to_length", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size",
        "use_prefix_grouper",
    ),
    "it was never run here",
)  # fmt: skip

ENGINE_REFUSED: Mapping[str, str] = {
    **_UNTRIED,
    "pad_to_length_bucket": "pad_to_length is not",
    "use_fused_kernels": "verl's FSDP engines do not read it",
    "router_replay": "explorers record no routes",
    "turbo_config": "only the strategy fsdp_turbo reads it, which is not supported",
    "qat": "weights of quantised training cannot be published",
}
"""Other fields of it that would do nothing, or that cannot work here, with the reason."""

ACTOR_ELSEWHERE: Mapping[str, str] = {
    "clip_ratio": "algorithm.clip_ratio", "clip_ratio_low": "algorithm.clip_ratio_low",
    "clip_ratio_high": "algorithm.clip_ratio_high", "loss_agg_mode": "algorithm.loss_agg_mode",
    "entropy_coeff": "algorithm.entropy_coeff", "use_kl_loss": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef", "kl_loss_type": "algorithm.kl_type", "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "algorithm.mini_batches", "ppo_micro_batch_size": "engine.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "engine.micro_batch_size",
    "ppo_infer_micro_batch_size_per_gpu": "engine.infer_micro_batch_size", "strategy": "engine.strategy",
    "grad_clip": "algorithm.optimizer.clip_grad", "optim": "algorithm.optimizer", "rollout_n": "data.group_size",
    "engine": "engine.options", "fsdp_config": "engine.options", "model_config": "model",
    "use_dynamic_bsz": "engine.options.use_dynamic_bsz",
    "ppo_max_token_len_per_gpu": "engine.options.max_token_len_per_gpu",
    "ppo_infer_max_token_len_per_gpu": "engine.options.infer_max_token_len_per_gpu",
    "entropy_checkpointing": "engine.options.entropy_checkpointing",
    "ulysses_sequence_parallel_size": "engine.options.ulysses_sequence_parallel_size",
    "use_rollout_log_probs": "algorithm.old_logprobs", "data_loader_seed": "job.seed",
    "checkpoint": FIXED_HERE, "global_batch_info": FIXED_HERE, "use_remove_padding": "engine.packing",
    "use_torch_compile": FIXED_HERE,
    "policy_loss.loss_mode": "algorithm.loss",
}  # fmt: skip
"""Fields of verl's FSDPActorConfig with the key that sets each."""

ACTOR_REFUSED: Mapping[str, str] = {
    "shuffle": "neighbours of a batch stay together",
    "freeze_vision_tower": "models are trained whole",
    "calculate_sum_pi_squared": "no supported estimator reads it",
    "use_fused_kernels": "verl's FSDP engines do not read it",
    "profiler": "only verl's own trainer reads it",
    "qat": ENGINE_REFUSED["qat"],
    **_UNTRIED,
    f"{CORRECTION}.rollout_is_batch_normalize": "weights must not depend on how a batch is split",
    f"{CORRECTION}.rollout_rs": 'rejection is not supported; rollout_is_threshold = "0.5_2.0" gives others weight 0',
    f"{CORRECTION}.rollout_rs_threshold": "rejection is not supported",
    f"{CORRECTION}.bypass_mode": 'it is algorithm.old_logprobs = "rollout"',
    f"{CORRECTION}.loss_type": "only bypass_mode reads it",
}
"""Other fields of it that would do nothing, or that cannot work here, with the reason."""


def _number(above: float = -math.inf, most: float = math.inf) -> Accept:
    def accept(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most

    return accept


def is_whole(value: Any) -> bool:
    """Return whether a value is a number of things, at least one."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _wrapping(*names: str) -> Accept:
    return lambda value: isinstance(value, Mapping) and set(value) <= set(names)


def is_threshold(value: Any) -> bool:
    """Return whether a value is a bound of rollout correction: a number, or `"lower_upper"`, whose lower may be 0."""
    if not isinstance(value, str):
        return _number(0)(value)
    try:
        bounds = [float(part) for part in value.split("_")]
    except ValueError:
        return False
    return 1 <= len(bounds) <= 2 and all(map(math.isfinite, bounds)) and 0 <= bounds[0] <= bounds[-1] > 0  # noqa: PLR2004


OF_LOSSES: Mapping[str, Accept] = {
    "clip_ratio_c": _number(above=1),
    "tau_pos": _number(above=0),
    "tau_neg": _number(above=0),
    "policy_loss.clip_cov_ratio": _number(above=0),
    "policy_loss.clip_cov_lb": _number(),
    "policy_loss.clip_cov_ub": _number(),
    "policy_loss.kl_cov_ratio": _number(above=0, most=1),
    "policy_loss.ppo_kl_coef": _number(),
    "policy_loss.dro_beta": _number(above=0),
}
"""The options that some losses read, with the values that they take; `LOSSES` says which loss reads which."""

OF_ALL: Mapping[str, Accept] = {
    "calculate_entropy": is_flag,
    "loss_scale_factor": _number(above=0),
    f"{CORRECTION}.rollout_is": lambda value: value in ("token", "sequence"),
    f"{CORRECTION}.rollout_is_threshold": is_threshold,
}
"""The options that every loss takes, with the values that they take; `_useless` says when they do nothing."""

OF_ENGINE: Mapping[str, Accept] = {
    "use_dynamic_bsz": is_flag,
    "max_token_len_per_gpu": is_whole,
    "infer_max_token_len_per_gpu": is_whole,
    "full_determinism": is_flag,
    "wrap_policy": _wrapping("transformer_layer_cls_to_wrap"),
    "reshard_after_forward": is_flag,
    "fsdp_size": lambda value: value == -1 or is_whole(value),
    "entropy_checkpointing": is_flag,
    "use_no_sync_for_gradient_accumulation": is_flag,
    "ulysses_sequence_parallel_size": is_whole,
}
"""The options that verl's FSDP engines read, with the values that they take."""

OF_FSDP1: Mapping[str, Accept] = {
    "forward_prefetch": is_flag,
    "use_orig_params": is_flag,
    "wrap_policy": _wrapping("transformer_layer_cls_to_wrap", "min_num_params", "disable"),
}
"""The options that only engine.strategy = "fsdp" reads, or of which it reads more."""


def algorithm_problems(section: AlgorithmSection) -> Iterator[Problem]:
    """Yield what is wrong with `algorithm.options`: names that do nothing with this loss, and refused values."""
    _, loss = estimator_and_loss(section)
    policy_loss = find_loss(loss)
    if section.name == SFT or policy_loss is None:
        return
    table, options = "algorithm.options", dict(_flat(section.options))
    accepted = {name: OF_LOSSES[name] for name in policy_loss.reads} | dict(OF_ALL)
    for name, value in options.items():
        if name in OF_LOSSES and name not in accepted:
            yield _problem(table, name, f"the loss {loss} does not read {table}.{name}", _readers(name))
        elif name in accepted and (why := _useless(name, section)):
            yield _problem(table, name, f"{table}.{name} does nothing: {why}")
        else:
            yield from option_problems(table, name, value, accepted, ACTOR_ELSEWHERE, ACTOR_REFUSED)
    if correction(section.options) is not None and section.old_logprobs == "rollout":
        why = 'with old_logprobs = "rollout" the ratio is already taken against the log-probs of explorers'
        yield _problem(table, CORRECTION, f"{table}.{CORRECTION} does nothing: {why}")
    if loss == "dro" and "policy_loss.dro_beta" not in options:
        yield _problem(
            table, "policy_loss.dro_beta", "dro needs a penalty", f"set {table}.policy_loss.dro_beta"
        )


def engine_problems(section: EngineSection) -> Iterator[Problem]:
    table, options = "engine.options", section.options
    accepted = {**OF_ENGINE, **(OF_FSDP1 if section.strategy == "fsdp" else {})}
    for name, value in options.items():
        if name in OF_FSDP1 and name not in accepted:
            yield _problem(
                table, name, f'{table}.{name} does nothing with engine.strategy = "{section.strategy}"'
            )
        elif name.endswith("max_token_len_per_gpu") and not options.get("use_dynamic_bsz"):
            yield _problem(table, name, f"{table}.{name} does nothing without {table}.use_dynamic_bsz = true")
        else:
            yield from option_problems(table, name, value, accepted, ENGINE_ELSEWHERE, ENGINE_REFUSED)
    if options.get("use_dynamic_bsz") is True and "max_token_len_per_gpu" not in options:
        hint = f"set {table}.max_token_len_per_gpu"
        yield _problem(table, "use_dynamic_bsz", "use_dynamic_bsz needs a bound", hint)


def correction(options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the table of rollout correction in `algorithm.options` with verl's defaults, None where it is off."""
    policy = options.get("policy_loss", {})
    settings = policy.get("rollout_correction") if isinstance(policy, Mapping) else None
    if not isinstance(settings, Mapping):
        return None
    return {"rollout_is": "sequence", "rollout_is_threshold": 2.0, **settings}


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by their dotted names; `policy_loss` and the correction in it are tables of more of them."""
    for name, value in table.items():
        whole = f"{before}{name}"
        if whole in ("policy_loss", CORRECTION) and isinstance(value, Mapping):
            yield from _flat(value, f"{whole}.")
        else:
            yield whole, value


def option_problems(
    table: str,
    name: str,
    value: Any,
    accepted: Mapping[str, Accept],
    elsewhere: Mapping[str, str],
    refused: Mapping[str, str],
) -> Iterator[Problem]:
    """Yield what is wrong with one option.

    Args:
        accepted: The options of the table, with the values that they take.
        elsewhere: Those that a key of the configuration sets, with the key.
        refused: Those that are not supported, with the reason.
    """
    whole = f"{table}.{name}"
    if name in elsewhere:
        yield _problem(table, name, f"{whole} is not set here", elsewhere[name])
    elif name in refused:
        yield _problem(table, name, f"{whole} is not supported: {refused[name]}")
    elif name not in accepted:
        choices = f"{table} takes {', '.join(sorted(accepted))}"
        yield _problem(table, name, f"verl has no {whole}", nearest(name, accepted) or choices)
    elif not accepted[name](value):
        yield _problem(table, name, f"{whole} = {shown(value)} is not an accepted value")


def _useless(name: str, section: AlgorithmSection) -> str:
    """Return why an option that every loss takes does nothing here, empty where it does something."""
    policy_loss = find_loss(estimator_and_loss(section)[1]) or OWN_LOSS
    mode = with_published(section).loss_agg_mode if policy_loss.has_modes else policy_loss.mode
    if name == "loss_scale_factor" and mode != "seq-mean-token-sum-norm":
        return 'it divides with loss_agg_mode = "seq-mean-token-sum-norm" only'
    if name == "calculate_entropy" and (section.old_logprobs == "recompute" or section.entropy_coeff):
        return "the entropy is measured without it"
    return ""


def _readers(name: str) -> str:
    losses = [loss for loss, its in LOSSES.items() if name in its.reads]
    return f"losses that read it: {', '.join(losses)}"


def _problem(table: str, name: str, text: str, hint: str | None = None) -> Problem:
    return Problem(f"{table}.{name}", text, hint)
