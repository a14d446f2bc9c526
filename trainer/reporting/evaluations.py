"""How good versions are on held-out tasks, from what explorers write: JOB/explorers/<name>/evaluations.jsonl.

A line says generation and step of a version, its mean reward and over how many tasks. It comes when the trainer is
steps ahead, so figures of a step have it under the names `eval/`, with the version's step in `eval/step`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from syncd.jsonl import read
from syncd.protocol.version import Pair
from trainer.monitors.jsonl import History

EVERY = 5.0
"""Seconds between two looks at the files."""

Means = dict[str, float]

_OWN = frozenset({"generation", "step", "at"})
"""Numbers of a line that are no figures."""

_SUMS = frozenset({"tasks", "failed", "tokens", "seconds"})
"""Figures that add up where several explorers have evaluated a version; the others are means over tasks."""


def read_evaluations(directory: str) -> dict[Pair, Means]:
    """Return what is known of each version by generation and step; what cannot be read is left out."""
    found: dict[Pair, Means] = {}
    for path in _files(directory):
        with suppress(OSError):
            for line in read(path):
                _add(found, line or {})
    return dict(sorted(found.items()))


def evaluation_history(directory: str) -> History:
    """Return the figures by the step of the version, under the names `eval/`; after a rewind, the newer versions'."""
    history = History()
    for (_, step), means in read_evaluations(directory).items():
        history.add({"step": step, "metrics": _named(means)})
    return history


class EvaluationWatch:
    """Gives the figures of each evaluation once, in the order of versions.

    Args:
        directory: The job directory; what is there already was reported by an earlier start.
        clock: Monotonic seconds.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._told = set(read_evaluations(directory))
        self._sizes = self._seen()
        self._pending: dict[Pair, Means] = {}
        self._at = clock()
        self._abandoned: Pair = (0, 0)

    def abandon(self, generation: int, step: int) -> None:
        """Give nothing of versions up to a generation that are beyond a step, from which the run has resumed."""
        self._abandoned = (generation, step)

    def next_figures(self) -> Means:
        """Return the figures of the oldest evaluation that was not given, empty if there is none."""
        if self._clock() - self._at >= EVERY:
            self._at = self._clock()
            self._look()
        if not self._pending:
            return {}
        pair = min(self._pending)
        self._told.add(pair)
        return {"eval/step": float(pair[1]), **_named(self._pending.pop(pair))}

    def _look(self) -> None:
        sizes = self._seen()
        if sizes != self._sizes:
            self._sizes = sizes
            known = read_evaluations(self._directory)
            (generation, step), told = self._abandoned, self._told
            self._pending = {
                pair: means
                for pair, means in known.items()
                if pair not in told and not (pair[0] <= generation and pair[1] > step)
            }

    def _seen(self) -> dict[str, int]:
        found = {}
        for path in _files(self._directory):
            with suppress(OSError):
                found[path] = os.stat(path).st_size
        return found


def _files(directory: str) -> Iterator[str]:
    root = f"{directory}/explorers"
    with suppress(OSError):
        for name in sorted(os.listdir(root)):
            yield f"{root}/{name}/evaluations.jsonl"


def _named(means: Means) -> Means:
    return {f"eval/{name}": value for name, value in means.items()}


def _add(found: dict[Pair, Means], line: Mapping[str, Any]) -> None:
    """Add a line; means of several explorers are weighted by their tasks."""
    generation, step = line.get("generation"), line.get("step")
    if type(generation) is not int or type(step) is not int:
        return
    its = {
        name: float(value) for name, value in line.items() if type(value) in (int, float) and name not in _OWN
    }
    before = found.get((generation, step), {})
    weights = before.get("tasks", 0.0), its.get("tasks", 0.0)
    found[generation, step] = {
        name: _joined(name, before.get(name), its.get(name), weights) for name in (before | its)
    }


def _joined(name: str, before: float | None, now: float | None, weights: tuple[float, float]) -> float:
    if before is None or now is None:
        return before if now is None else now  # type: ignore[return-value]  # one of them is there
    if name in _SUMS:
        return before + now
    return (before * weights[0] + now * weights[1]) / (sum(weights) or 1.0)
