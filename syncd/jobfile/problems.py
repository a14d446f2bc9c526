"""Problems of a file, reported in one error."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from syncd.errors import ConfigError

_SHOWN = 80  # characters of a value that a message shows


@dataclass(frozen=True, slots=True)
class Problem:
    key: str  # the dotted key that it is about
    text: str  # one sentence that names the key
    hint: str | None = None  # what to change, if that is known
    where: str = ""  # the file, or `the command line`

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.text}: {self.where}{hint}"


def error_of(problems: Sequence[Problem], hint: str) -> ConfigError:
    """Return one error for all problems; `hint` is what to run if there are several, or the only one has none."""
    if len(problems) == 1:
        (only,) = problems
        return ConfigError(only.text, path=only.where, hint=only.hint or hint)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems with the configuration:{lines}", hint=hint)


def shown(value: Any) -> str:
    """Return a value as a file would have it, shortened if it is long."""
    text = json.dumps("none" if value is None else value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the hint that names the known name that was probably meant, None if none is close."""
    near = nearest_name(name, names)
    return f"did you mean {near}?" if near else None


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, best one of the same letters; None if none is close."""
    near = get_close_matches(name, sorted(names), 3)
    return max(near, key=lambda other: sorted(other) == sorted(name), default=None)
