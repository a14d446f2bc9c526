"""What several tables need: names of algorithms, what a loss reads, learning rates, directories."""

from collections.abc import Mapping
from typing import Any

from trainer.config.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    GAE,
    LACKING,
    LACKING_LOSSES,
    LOSSES,
    NORMALISED,
)
from trainer.parts.importing.rows import CannotMapError, Given

OPTIMIZER = "algorithm.optimizer"


def name_of(estimator: str, loss: str) -> dict[str, Any]:
    """Return the keys that choose verl's estimator and loss.

    Args:
        estimator: verl's name.
        loss: verl's name.
    """
    for name, known, lacking in ((estimator, ADVANTAGES | {GAE}, LACKING), (loss, LOSSES, LACKING_LOSSES)):
        if name in lacking:
            raise CannotMapError(
                f"{name} is not supported: {lacking[name]}",
                "trainer config algorithms, and --algorithm.name NAME",
            )
        if name not in known:
            raise CannotMapError(
                f"{name!r} is neither an estimator nor a loss here",
                "trainer config algorithms, and --algorithm.name NAME",
            )
    if estimator == GAE:
        other = {} if loss == "vanilla" else {"algorithm.loss": loss}
        return {"algorithm.name": "ppo", "critic.enabled": True, **other}
    for name, pair in ALGORITHMS.items():
        if (pair.advantage, pair.loss) == (estimator, loss) and name != "ppo":
            return {"algorithm.name": name}
    chosen = {"algorithm.advantage": estimator, "algorithm.loss": loss}
    return {"algorithm.name": "grpo", **chosen}


def clips(loss: str, low: float, high: float) -> dict[str, Any]:
    """Return the bounds of the ratio, nothing for a loss that has none."""
    if loss not in LOSSES or not LOSSES[loss].clip:
        return {}
    return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}


def aggregation(loss: str, mode: str, key: str) -> dict[str, Any]:
    """Return how the losses of tokens become one, nothing for a loss with one way only.

    Args:
        loss: verl's name.
        mode: verl's name.
        key: Their key of it, for the error.
    """
    if loss not in LOSSES or LOSSES[loss].has_modes:
        return {"algorithm.loss_agg_mode": mode}
    only = LOSSES[loss].mode
    if mode != only:
        raise CannotMapError(f"the loss {loss} is {only} here, not {mode}", f"--set {key}={only}")
    return {}


def only_mode(loss: str) -> str | None:
    """Return the one way in which a loss of verl makes one number of many, None where there are several."""
    return None if loss not in LOSSES or LOSSES[loss].has_modes else LOSSES[loss].mode


def normalised(estimator: str, *, by_deviation: bool) -> dict[str, Any]:
    """Return whether advantages are divided by their deviation, nothing for an estimator that does not ask."""
    return {"algorithm.norm_advantage": by_deviation} if estimator in NORMALISED else {}


def options_of(loss: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of verl's actor that a loss reads, of those that are given."""
    reads = LOSSES[loss].reads if loss in LOSSES else frozenset()
    return {
        f"algorithm.options.{name}": value
        for name, value in values.items()
        if name in reads and value is not None
    }


def style_of(given: Given, style: str, table: str = OPTIMIZER) -> str:
    """Return what a learning rate does: what the user chose, else what the file says."""
    return str(given.chosen.get(f"{table}.schedule", style))


def schedule(style: str, warmup: float, table: str = OPTIMIZER, *, least: float = 0.0) -> dict[str, Any]:
    """Return the keys of a learning rate.

    Args:
        style: constant, cosine or linear, in any of the usual spellings.
        warmup: Updates over which it rises.
        least: Where it ends, as a share of the peak; only cosine reads it.
    """
    known = {"constant_with_warmup": "constant"} | {name: name for name in ("constant", "cosine", "linear")}
    if style not in known:
        instead = f"--{table}.schedule cosine, linear or constant"
        raise CannotMapError(f"a rate that is {style} is not supported", instead)
    if least and style == "linear":
        raise CannotMapError("a linear rate ends at 0 here", f"--{table}.schedule cosine")
    ends = {f"{table}.min_lr_ratio": least} if least and style == "cosine" else {}
    return {f"{table}.schedule": known[style], f"{table}.warmup_steps": round(warmup), **ends}


def warmup_updates(given: Given, steps: str, ratio: str, total: str, updates: int) -> float:
    """Return the updates of the warm-up, from a number of steps or, where that is below 0, a share of all.

    Args:
        steps: The key of the number of steps.
        ratio: The key of the share.
        total: The key of the number of training steps.
        updates: Updates of one training step.
    """
    number, share = given.whole(steps, -1), given.number(ratio, 0.0)
    if number >= 0:
        return number * updates
    if not share:
        return 0
    if given.whole(total, -1) <= 0:
        raise CannotMapError("is a share of steps that the file does not count", f"--set {steps}=STEPS")
    return int(share * given.whole(total)) * updates


def whole_ratio(above: int, below: int, what: str) -> int:
    """Return how often one number contains another."""
    if below <= 0 or above % below:
        raise CannotMapError(f"{what}: {above} cannot be divided by {below}")
    return above // below


def split_rows(ranks: int) -> dict[str, Any]:
    """Return the keys that split each row over ranks, with verl's default attention, which that needs."""
    options = {"engine.options.ulysses_sequence_parallel_size": ranks}
    return {**options, "model.attn_implementation": "flash_attention_2"}
