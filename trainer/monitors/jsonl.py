"""`JOB/metrics.jsonl` and `JOB/rollouts.jsonl`: what every run leaves, whatever else is asked for.

A line of metrics.jsonl is `{"step": n, "time": "...", "metrics": {...}}`. Nothing is ever rewritten. A run that
resumes at an earlier step appends that step again, and the rule for readers is one sentence: a line of step s
takes back all lines of later steps, and what it says of s holds. `trainer.monitors.history` reads by it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from syncd.jsonl import append
from trainer.monitors.base import Rollout, Run

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"

MAX_ROLLOUTS = 64 << 20
"""Bytes beyond which rollouts.jsonl becomes rollouts.jsonl.1, and the one before it goes."""


class Jsonl:
    """Appends to the job directory.

    Args:
        run: The run.
        max_rollouts: Bytes of rollouts.jsonl beyond which it is rotated.
    """

    def __init__(self, run: Run, max_rollouts: int = MAX_ROLLOUTS) -> None:
        self._metrics = os.path.join(run.directory, METRICS)
        self._rollouts = os.path.join(run.directory, ROLLOUTS)
        self._max_rollouts = max_rollouts

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the figures of a step; NaN and infinity become null and are named in `not_finite`."""
        append(self._metrics, [_figures(metrics, step)])

    def log_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Append rollouts, one a line."""
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
