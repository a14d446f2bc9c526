"""The strict reading of JSON that engines answer: what is not as expected raises `ValueError` with what was found."""

import math
from typing import Any, TypeVar

_ROUNDING = 1e-4  # how far above 0 rounding may lift a log-prob
_LONGEST_EXCERPT = 80

T = TypeVar("T")


def typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{_excerpt(value)} instead of {kind.__name__}")
    return value


def member(holder: object, key: str | int, kind: type[T]) -> T:
    if isinstance(holder, dict) and key in holder:
        return _named(key, holder[key], kind)
    if isinstance(holder, list) and type(key) is int and key < len(holder):
        return _named(key, holder[key], kind)
    raise ValueError(f"no {key} in {_excerpt(holder)}")


def listed(holder: object, key: str, count: int) -> list[Any]:
    entries = member(holder, key, list)
    if len(entries) != count:
        raise ValueError(f"{key} has {len(entries)} entries instead of {count}")
    return entries


def log_prob(answer: object) -> float:
    value = typed(answer, float) if isinstance(answer, float) else float(typed(answer, int))
    if not math.isfinite(value) or value > _ROUNDING:
        raise ValueError(f"{value} is no log-prob")
    return value


def positive(value: object, default: int) -> int:
    """Return a number that an engine's configuration has, the default if it is none or below 1."""
    return value if type(value) is int and value > 0 else default


def _named(key: str | int, value: object, kind: type[T]) -> T:
    try:
        return typed(value, kind)
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from None


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}..."
