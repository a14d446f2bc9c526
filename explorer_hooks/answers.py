"""The strict reading of JSON that engines answer: what is not as expected raises `ValueError` with what was found."""

import math
from typing import Any, TypeVar

_ROUNDING = 1e-4
"""How far above 0 rounding may lift a log-prob."""
_LONGEST_EXCERPT = 80

T = TypeVar("T")


def typed(found: object, kind: type[T]) -> T:
    """Return something that has the wanted type."""
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise ValueError(f"{_excerpt(found)} instead of {kind.__name__}")
    return found


def member(holder: object, key: str | int, kind: type[T]) -> T:
    """Return a member of an object or a list."""
    if isinstance(holder, dict) and key in holder:
        return _named(key, holder[key], kind)
    if isinstance(holder, list) and type(key) is int and key < len(holder):
        return _named(key, holder[key], kind)
    raise ValueError(f"no {key} in {_excerpt(holder)}")


def listed(holder: object, key: str, count: int) -> list[Any]:
    """Return a member that is a list of so many."""
    found = member(holder, key, list)
    if len(found) != count:
        raise ValueError(f"{key} has {len(found)} entries instead of {count}")
    return found


def log_prob(found: object) -> float:
    """Return a log-prob."""
    value = typed(found, float) if isinstance(found, float) else float(typed(found, int))
    if not math.isfinite(value) or value > _ROUNDING:
        raise ValueError(f"{value} is no log-prob")
    return value


def positive(found: object, default: int) -> int:
    """Return a number that an engine's configuration has, the default if it is none or below 1."""
    return found if type(found) is int and found > 0 else default


def _named(key: str | int, found: object, kind: type[T]) -> T:
    try:
        return typed(found, kind)
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from None


def _excerpt(found: object) -> str:
    text = repr(found)
    return text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}..."
