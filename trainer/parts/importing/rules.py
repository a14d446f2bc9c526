"""What the tables of keys call: algorithms, what a loss reads, learning rates, from another project's values.

Each function returns a value, several by our keys, or None.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.config.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    GAE,
    LACKING,
    LACKING_LOSSES,
    LOSSES,
    NORMALISED,
    SFT,
)
from trainer.parts.importing import tasks
from trainer.parts.importing.configuration import (
    CannotMapError,
    Configuration,
    as_flag,
    as_list,
    as_text,
    as_whole,
)

_OPTIMIZER = "algorithm.optimizer"
_CRITICS = "critic.optimizer"
_ALGORITHMS = "trainer config algorithms, and --algorithm.name NAME"
_OF_SUMS = "seq-mean-token-sum-norm"
_ANY_HOST = ("", "0.0.0.0")  # noqa: S104 - TRL's default, to which nothing is bound here
_STYLES = {name: name for name in ("constant", "cosine", "linear")} | {"constant_with_warmup": "constant"}


def algorithm(estimator: str, loss: str) -> dict[str, Any]:
    if estimator == SFT:
        return {"algorithm.name": SFT}
    for name, supported, lacking in (
        (estimator, ADVANTAGES | {GAE}, LACKING),
        (loss, LOSSES, LACKING_LOSSES),
    ):
        if name in lacking:
            raise CannotMapError(f"{name} is not supported: {lacking[name]}", _ALGORITHMS)
        if name not in supported:
            raise CannotMapError(f"{name!r} is neither an estimator nor a loss here", _ALGORITHMS)
    if estimator == GAE:
        other = {} if loss == "vanilla" else {"algorithm.loss": loss}
        return {"algorithm.name": "ppo", "critic.enabled": True, **other}
    for name, parts in ALGORITHMS.items():
        if (parts.advantage, parts.loss) == (estimator, loss) and name != "ppo":
            return {"algorithm.name": name}
    return {"algorithm.name": "grpo", "algorithm.advantage": estimator, "algorithm.loss": loss}


def clips(loss: str, low: float, high: float, *, of_ratio: bool = False) -> dict[str, Any]:
    """Return the bounds of the ratio, nothing for a loss that has none.

    The ratio may fall `low` below 1 and rise `high` above it. With `of_ratio`, `high` of cispo is the bound of the
    ratio itself, and there is none below.
    """
    if loss not in LOSSES or not LOSSES[loss].clip:
        return {}
    if of_ratio and loss == "cispo":
        low, high = 10.0, high - 1
    return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}


def aggregation(loss: str, mode: str, scale: Any = None, key: str = "") -> dict[str, Any]:
    """Return how the losses of tokens become one, nothing for a loss with one way only; a sum is divided by `scale`.

    `key` is their key of the mode, if their loss reads it where verl's has one way only.
    """
    if loss in LOSSES and not LOSSES[loss].has_modes:
        if key and mode != LOSSES[loss].mode:
            why = f"the loss {loss} is {LOSSES[loss].mode} here, not {mode}"
            raise CannotMapError(why, f"--set {key}={LOSSES[loss].mode}")
        return {}
    divided = {"algorithm.options.loss_scale_factor": scale} if mode == _OF_SUMS else {}
    return {"algorithm.loss_agg_mode": mode, **divided}


def options(loss: str, **values: Any) -> dict[str, Any]:
    """Return the options of verl's actor that a loss reads."""
    reads = LOSSES[loss].reads if loss in LOSSES else ()
    return {f"algorithm.options.{name}": value for name, value in values.items() if name in reads}


def normalised(estimator: str, *, by_deviation: bool) -> bool | None:
    return by_deviation if estimator in NORMALISED else None


def schedule(
    style: str,
    steps: float | None = None,
    share: float | None = None,
    total: int | None = None,
    updates: int = 1,
    least: float | None = None,
    lowest: float = 0.0,
    peak: float = 1.0,
    key: str = "",
) -> dict[str, Any]:
    """Return the keys of a learning rate.

    Args:
        steps: Training steps over which it rises; below 0, `share` of all steps.
        updates: Updates of one training step.
        least: Where it ends, as a share of the peak; only cosine reads it.
        lowest: The same as a rate.
        peak: The rate from which it falls.
        key: Their key of `steps`.
    """
    shape = _style(style, _OPTIMIZER)
    warmup = _warmup(-1 if steps is None else steps, share or 0.0, total or 0, key) * updates
    least = least or (lowest / peak if peak else 0.0)
    if least and shape == "linear":
        raise CannotMapError("a linear rate ends at 0 here", f"--{_OPTIMIZER}.schedule cosine")
    ends = {f"{_OPTIMIZER}.min_lr_ratio": least} if least and shape == "cosine" else {}
    return {f"{_OPTIMIZER}.schedule": shape, f"{_OPTIMIZER}.warmup_steps": round(warmup), **ends}


def _style(style: str, table: str) -> str:
    if style not in _STYLES:
        instead = f"--{table}.schedule cosine, linear or constant"
        raise CannotMapError(f"a rate that is {style} is not supported", instead)
    return _STYLES[style]


def _warmup(steps: float, share: float, total: int, key: str) -> float:
    if steps >= 0 or not share:
        return max(steps, 0)
    if total <= 0:
        raise CannotMapError("is a share of steps that the file does not count", f"--set {key}=STEPS")
    return int(share * total)


def critic_schedule(style: str, steps: float, share: float) -> dict[str, Any]:
    if steps > 0 or share > 0:
        instead = f"--{_CRITICS}.warmup_steps UPDATES"
        raise CannotMapError("the critic's updates are counted by themselves", instead)
    return {f"{_CRITICS}.schedule": _style(style, _CRITICS), f"{_CRITICS}.warmup_steps": 0}


def ratio(above: int, below: int, what: str) -> int:
    if below <= 0 or above % below:
        raise CannotMapError(f"{what}: {above} cannot be divided by {below}")
    return above // below


def groups(size: int, what: str, rows: int | None = None, tasks: int | None = None) -> dict[str, Any]:
    """Return groups of a step, rollouts of a group, and groups of an explorer's batch where they differ.

    `tasks` are those of an explorer's batch, and without `rows` of a step.
    """
    count = ratio(rows, size, what) if rows else tasks
    return {
        "data.groups": count,
        "data.group_size": size,
        "explorer.groups": tasks if tasks != count else None,
    }


def product(factors: Sequence[int | None]) -> int | None:
    numbers = [factor for factor in factors if factor is not None]
    return math.prod(numbers) if len(numbers) == len(factors) else None


def least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def agreed(values: Iterable[Any], why: str) -> Any:
    first, *others = [value for value in values if value is not None] or [None]
    if any(other != first for other in others):
        raise CannotMapError(why)
    return first


def pair(first: Any, second: Any) -> list[Any]:
    return [first, second]


def joined(parts: Iterable[Any]) -> str:
    return "/".join(filter(None, (as_text(part) for part in parts if part is not None)))


def any_of(flags: Iterable[bool | None]) -> bool:
    return any(flags)


def split_rows(ranks: int = 1) -> dict[str, Any]:
    """Return the keys that split each row over ranks, with verl's default attention, which that needs."""
    if ranks <= 1:
        return {}
    attention = {"model.attn_implementation": "flash_attention_2"}
    return {"engine.options.ulysses_sequence_parallel_size": ranks, **attention}


def sampled(mode: str, cap: float) -> dict[str, Any]:
    """Return the weights by which TRL corrects for the engine's own probabilities."""
    level, _, how = mode.partition("_")
    if how not in ("truncate", "mask") or level not in ("token", "sequence"):
        names = ("vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_correction=False")
        instead = " or ".join(f"--set {name}" for name in names)
        raise CannotMapError(f"{mode} is no correction that is known here", instead)
    table = "algorithm.options.policy_loss.rollout_correction"
    threshold = cap if how == "truncate" else f"0_{cap:g}"
    return {f"{table}.rollout_is": level, f"{table}.rollout_is_threshold": threshold}


def address(port: int, host: str = "") -> str | None:
    return None if host in _ANY_HOST else f"http://{host}:{port}"


def of_chosen(config: Configuration, part: str, name: str, differs: Mapping[str, str] | None = None) -> str:
    """Return the part, advantage or loss, of the algorithm that the user names in place of another project's.

    `differs` says how algorithms of that name differ from ours.
    """
    if (chosen := ALGORITHMS.get(str(config.chosen.get("algorithm.name")))) is not None:
        return str(getattr(chosen, part))
    if name in (differs or {}):
        raise CannotMapError((differs or {})[name], f"--algorithm.name {name}")
    raise CannotMapError(f"{name} is not supported", _ALGORITHMS)


def own(config: Configuration, keys: Iterable[str]) -> list[Any]:
    return [config.get(key) for key in keys if key in config.values]


def verl_strategy(config: Configuration, key: str, megatron: str, defaults: Sequence[str] = ()) -> Any:
    """Return verl's strategy: what the user gave, else that of the file on which the configuration builds."""
    return "megatron" if key not in config.values and megatron in defaults else config.get(key)


def below(config: Configuration, table: str, to: str) -> dict[str, Any]:
    return {f"{to}.{key}": value for key, value in config.below(table).items()}


def verl_lora(config: Configuration, table: str) -> dict[str, Any]:
    """Return the adapter of verl, whose keys are `lora_rank` and others, or those of the table `lora`."""
    nested = "lora." if as_whole(config.get(f"{table}.lora.rank", 0)) else ""
    flat = nested or "lora_"
    rank = as_whole(config.get(f"{table}.{flat}rank", 0))
    if not rank:
        return {}
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": as_whole(config.get(f"{table}.{flat}alpha", 32 if nested else 16)),
        "model.lora.targets": config.get(f"{table}.{nested}target_modules", "all-linear"),
        "model.lora.exclude": as_list(config.get(f"{table}.{nested}exclude_modules", [])),
        "model.lora.adapter": as_text(config.get(f"{table}.{flat}adapter_path", "")) or None,
        "model.lora.publish": "merged" if as_flag(config.get(f"{table}.lora.merge", False)) else None,
    }


CALLED: Mapping[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (
        address, aggregation, agreed, algorithm, any_of, clips, critic_schedule, groups, joined, least, normalised,
        options, pair, product, ratio, sampled, schedule, split_rows,
    )
}  # fmt: skip
"""What `call` names in a table."""

READING: Mapping[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (
        below, of_chosen, own, tasks.prime_filters, tasks.trinity_tasks, tasks.trl_tasks, tasks.verifiers_environment,
        tasks.verl_tasks, verl_lora, verl_strategy,
    )
}  # fmt: skip
"""What `read` names in a table: functions that get the configuration too."""
