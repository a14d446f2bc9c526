"""Checks which attention a model is given, and over how many ranks a row is split (Ulysses). Needs no torch.

Ulysses gives each rank of a group a part of all rows, and inside of attention a part of all heads instead. verl
exchanges them in front of transformers' flash attention alone: with another attention each rank would answer for its
part of a row as if there were no other.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from trainer.config.options import is_whole

FLASH = frozenset({"flash_attention_2", "flash_attention_3", "flash_attention_4"})
"""The values of `model.attn_implementation` that need GPUs and compute in half precision."""

DEGREE = "ulysses_sequence_parallel_size"  # verl's name of the number of ranks that share each row

_KEY = f"engine.options.{DEGREE}"


def degree_of(config: JobFile) -> int:
    """Return over how many ranks each row is split, 1 where none is."""
    degree = config.engine.options.get(DEGREE, 1)
    return degree if is_whole(degree) else 1


def attention_problems(config: JobFile) -> Iterator[Problem]:
    attention, dtype, degree = (
        config.model.attn_implementation,
        config.engine.compute_dtype,
        degree_of(config),
    )
    if attention in FLASH and dtype != "bfloat16":
        text = f'model.attn_implementation = "{attention}" cannot compute in {dtype}'
        yield Problem("model.attn_implementation", text, 'engine.compute_dtype = "bfloat16"')
    if degree > 1 and not config.engine.packing:
        yield Problem(_KEY, f"{_KEY} = {degree} splits packed rows only", "engine.packing = true")
    if degree > 1 and attention not in FLASH:
        text = f'{_KEY} = {degree} needs flash attention, and model.attn_implementation is "{attention}"'
        yield Problem(_KEY, text, 'model.attn_implementation = "flash_attention_2"')


def require_groups(config: JobFile, ranks: int) -> None:
    degree = degree_of(config)
    if ranks % degree:
        more = (ranks // degree + 1) * degree
        raise ConfigError(
            f"{ranks} ranks are no groups of {_KEY} = {degree}", hint=f"start {more} ranks, for example"
        )


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's config that describes its text model; null stands for none, as in transformers."""
    return model.get("text_config") or model


def check_heads(config: JobFile, model: Mapping[str, Any], path: str) -> None:
    """Refuse a model whose heads the ranks of a row cannot share; one that does not count them, verl refuses."""
    degree, own = degree_of(config), text_config(model)
    heads = own.get("num_attention_heads") or degree
    keys = own.get("num_key_value_heads") or heads
    if heads % degree or (keys % degree and degree % keys):  # keys of fewer heads than ranks are repeated
        text = f"{heads} heads ({keys} of keys) cannot be divided by {_KEY} = {degree}"
        divisors = (size for size in range(degree - 1, 1, -1) if not heads % size and not keys % size)
        raise ConfigError(text, path=path, hint=f"{_KEY} = {next(divisors, 1)}")
