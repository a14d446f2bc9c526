"""`JOB/metrics.jsonl` and `JOB/rollouts.jsonl`: what every run leaves, whatever else is asked for.

A line of metrics.jsonl is `{"step": n, "time": "...", "metrics": {...}}`. Nothing is ever rewritten. A run that
resumes at an earlier step appends that step again, and the rule for readers is one sentence: a line of step s
takes back all lines of later steps, and what it says of s holds. `trainer.monitors.jsonl` reads by it, and gives
figures that an earlier release wrote by their present names.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from syncd.figures import METRICS, by_present_names
from syncd.jsonl import append, read
from trainer.monitors.base import MonitoredRun, RolloutSample

ROLLOUTS = "rollouts.jsonl"

MAX_ROLLOUTS = 64 << 20
"""Bytes beyond which rollouts.jsonl becomes rollouts.jsonl.1, and the one before it goes."""


class Jsonl:
    """Appends to the job directory; rollouts.jsonl is rotated beyond `max_rollouts` bytes."""

    def __init__(self, run: MonitoredRun, max_rollouts: int = MAX_ROLLOUTS) -> None:
        self._metrics = os.path.join(run.directory, METRICS)
        self._rollouts = os.path.join(run.directory, ROLLOUTS)
        self._max_rollouts = max_rollouts

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the figures of a step; NaN and infinity become null and are named in `not_finite`."""
        append(self._metrics, [_figures(metrics, step)])

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        if self._is_full():
            os.replace(self._rollouts, f"{self._rollouts}.1")
        now = _now()
        append(self._rollouts, [{"step": step, "time": now, "rollout": asdict(each)} for each in rollouts])

    def close(self) -> None:
        """Do nothing: each line is written when it comes."""

    def _is_full(self) -> bool:
        with suppress(FileNotFoundError):
            return os.stat(self._rollouts).st_size >= self._max_rollouts
        return False


def _figures(metrics: Mapping[str, float], step: int) -> dict[str, Any]:
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    odd = sorted(name for name, value in finite.items() if value is None)
    line = {"step": step, "time": _now(), "metrics": finite}
    return line | {"not_finite": odd} if odd else line


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class History:
    """Figures by step, in the order of steps."""

    # The figures of each step; NaN where the value was not finite.
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    ignored: int = 0  # lines that were not read: torn, or not of this format

    def add(self, document: Mapping[str, Any] | None) -> None:
        """Add one line; it revokes what earlier lines say of later steps."""
        step, figures = _checked(document)
        if step is None:
            self.ignored += 1
            return
        while self.steps and next(reversed(self.steps)) > step:
            self.steps.popitem()
        self.steps.setdefault(step, {}).update(figures)

    def series(self, *names: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric, the first of the names that a step has."""
        chosen = {step: [has[name] for name in names if name in has] for step, has in self.steps.items()}
        points = {step: values[0] for step, values in chosen.items() if values}
        return list(points), list(points.values())


def read_history(path: str) -> History:
    history = History()
    for document in read(path):
        history.add(document)
    return history


def _checked(document: Mapping[str, Any] | None) -> tuple[int | None, dict[str, float]]:
    step, metrics = (document or {}).get("step"), (document or {}).get("metrics")
    if type(step) is not int or not isinstance(metrics, dict):
        return None, {}
    figures = {
        name: math.nan if value is None else value for name, value in by_present_names(metrics).items()
    }
    return step, {name: float(value) for name, value in figures.items() if type(value) in (int, float)}
