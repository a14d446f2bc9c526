"""What metrics.jsonl says after any number of kills and resumes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from syncd.jsonl import read


@dataclass
class History:
    """Figures by step, in the order of steps.

    Args:
        steps: The figures of each step; NaN where the value was not finite.
        ignored: Lines that were not read: torn, or not of this format.
    """

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    ignored: int = 0

    def add(self, document: Mapping[str, Any] | None) -> None:
        """Take one line; it takes back what earlier lines say of later steps."""
        step, figures = _checked(document)
        if step is None:
            self.ignored += 1
            return
        while self.steps and next(reversed(self.steps)) > step:
            self.steps.popitem()
        self.steps.setdefault(step, {}).update(figures)

    def series(self, *names: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric, the first of the names that a step has."""
        found = [(step, name) for step, has in self.steps.items() for name in _first(names, has)]
        return [step for step, _ in found], [self.steps[step][name] for step, name in found]


def read_history(path: str) -> History:
    """Return the history of a metrics.jsonl.

    Raises:
        OSError: The file cannot be read.
    """
    history = History()
    for document in read(path):
        history.add(document)
    return history


def _first(names: Iterable[str], figures: Mapping[str, float]) -> list[str]:
    return [name for name in names if name in figures][:1]


def _checked(document: Mapping[str, Any] | None) -> tuple[int | None, dict[str, float]]:
    step, metrics = (document or {}).get("step"), (document or {}).get("metrics")
    if type(step) is not int or not isinstance(metrics, dict):
        return None, {}
    return step, {name: _number(value) for name, value in metrics.items() if _is_figure(value)}


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
