"""The values of one configuration of another project, and what they are read as."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MONITORS = frozenset({"wandb", "tensorboard", "mlflow", "trackio"})
_NO_MONITORS = ("console", "file", "none")


class CannotMapError(Exception):
    """A value has no counterpart here.

    Args:
        why: The reason, in a sentence without a subject and a full stop.
        instead: What to do, best a command's option; empty where the row says it.
    """

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(why)
        self.why, self.instead = why, instead


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that only the other program knows: `${...}` of something that the file does not have."""

    why: str


class Configuration:
    """The values of one configuration by their dotted keys, with the other program's defaults below them.

    Args:
        values: What the user gave, without what is null.
        chosen: Our keys that the user gives beside the file.
        facts: What a table computes under a name of its own.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        chosen: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        self.values, self.all, self.chosen, self.facts = values, {**defaults, **values}, chosen, facts

    def __contains__(self, key: str) -> bool:
        return self.all.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self.all.get(key)
        if isinstance(value, Unresolved):
            raise CannotMapError(value.why, f"--set {key}=VALUE")
        if isinstance(value, list) and None in value:  # TOML has none
            raise CannotMapError("has null among its values", f"--set {key}=VALUE")
        return default if value is None else value

    def below(self, table: str) -> dict[str, Any]:
        start = f"{table}."
        return {key.removeprefix(start): self.get(key) for key in self.values if key.startswith(start)}


def as_number(value: Any) -> float:
    """Return a number, also one that is written as text, as YAML 1.1 reads `1e-6`."""
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            return number
    raise CannotMapError("is not a number")


def as_whole(value: Any) -> int:
    number = as_number(value)
    if number != int(number):
        raise CannotMapError("is not a whole number")
    return int(number)


def as_flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, bool):
        return value
    raise CannotMapError("is neither true nor false")


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise CannotMapError("is not text")


def as_list(value: Any) -> list[Any] | None:
    return (value or None) if isinstance(value, list) else [as_text(value)]


def _as_interval(value: Any) -> int:
    return max(as_whole(value), 0)


def _as_count(value: Any) -> int:
    if as_number(value) < 1:
        raise CannotMapError("is a share of the run, and here steps are counted")
    return as_whole(value)


def _as_monitors(value: Any) -> list[str]:
    names = [as_text(name) for name in as_list(value) or () if name not in _NO_MONITORS]
    if others := set(names) - MONITORS:
        raise CannotMapError(
            f"{', '.join(sorted(others))} does not exist", "--monitor.kinds '[\"tensorboard\"]'"
        )
    return names


def _as_layers(value: Any) -> list[str]:
    names = [as_text(name) for name in as_list(value) or ()]
    if odd := [name for name in names if not name.replace("_", "").isalnum() or name == "experts"]:
        raise CannotMapError(f"{', '.join(odd)}: layers are named, by no pattern")
    return names


def _as_kl(value: Any) -> str:
    """Return verl's name of an estimate of KL; `+` asks for another gradient, which a reward has not."""
    return as_text(value).rstrip("+")


TYPES: Mapping[str, Callable[[Any], Any]] = {
    "number": as_number,
    "whole": as_whole,
    "flag": as_flag,
    "text": as_text,
    "list": as_list,
    "interval": _as_interval,
    "count": _as_count,
    "monitors": _as_monitors,
    "layers": _as_layers,
    "kl": _as_kl,
}
"""What `type` names in a table."""
