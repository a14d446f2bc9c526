"""How good versions are on held-out tasks, from what explorers write: JOB/explorers/<name>/evaluations.jsonl.

A line says generation and step of a version, the set, and its figures. It comes when the trainer is steps ahead, so
figures of a step have it under the names `eval/`, those of a named set under `eval/NAME/`, with the version's step in
`eval/step`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from syncd.jsonl import read
from syncd.protocol.documents import Fields
from trainer.monitors.jsonl import History

EVERY = 5.0  # seconds between two looks at the files

Means = dict[str, float]

_OWN = frozenset({"generation", "step", "at"})  # numbers of a line that are no figures

_SUMS = frozenset({"tasks", "failed", "tokens", "seconds"})
"""Figures that add up where several explorers have evaluated a version; the others are means over tasks."""


class EvaluationKey(NamedTuple):
    """What was measured: a version, by a set, which has an empty name if it is [explorer.evaluation] itself."""

    generation: int
    step: int
    of_set: str


@dataclass(frozen=True, slots=True)
class _Line:
    evaluation: EvaluationKey
    key: str
    at: float
    is_bench: bool
    means: Means


@dataclass(frozen=True, slots=True)
class SetFigures:
    means: Means  # the figures, without the names of sets
    # Whether only `explorer bench` has measured it. That measures steps as they are in the job, whichever
    # generation published them, so the generation says nothing of what came after.
    is_bench: bool

    def named(self, of_set: str) -> Means:
        prefix = f"eval/{of_set}/" if of_set else "eval/"
        return {f"{prefix}{name}": value for name, value in self.means.items()}


def read_evaluations(directory: str) -> dict[EvaluationKey, SetFigures]:
    """Return what is known of each version and set, in order; what cannot be read is left out.

    If the settings of a set have changed (its `key`), those of the newest line count. Of several lines of one
    explorer the last one counts; means of several explorers are weighted by their tasks.
    """
    lines: dict[tuple[EvaluationKey, str, str], _Line] = {}
    for path in _files(directory):
        with suppress(OSError):
            for document in read(path):
                line = _line(document or {})
                if line is not None:
                    lines[line.evaluation, line.key, path] = line
    by_evaluation = sorted(lines.values(), key=lambda line: line.evaluation)
    return {key: _joined(list(its)) for key, its in groupby(by_evaluation, key=lambda line: line.evaluation)}


def evaluation_history(directory: str) -> History:
    """Return the figures by the step of the version, under the names `eval/`; after a rewind, the newer versions'."""
    newest: dict[int, tuple[EvaluationKey, Means]] = {}
    for key, measured in read_evaluations(directory).items():
        if not measured.is_bench:  # it takes back this step and later ones of earlier generations
            newest = {step: its for step, its in newest.items() if step < key.step or its[0][:2] == key[:2]}
        before = newest[key.step][1] if key.step in newest else {}
        newest[key.step] = (key, before | measured.named(key.of_set))
    return History({step: means for step, (_, means) in sorted(newest.items())})


class EvaluationWatch:
    """Gives the figures of each evaluation once, in the order of versions; `clock` gives monotonic seconds.

    Its state is part of each full checkpoint: what a run gave after its checkpoint, and what was written while it was
    down, a resume gives.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._reported: set[EvaluationKey] = set()
        self._abandoned: set[tuple[int, int]] = set()
        self._pending: dict[EvaluationKey, SetFigures] = {}
        self._sizes: dict[str, int] = {}
        self._at = -math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"told": sorted(map(list, self._reported)), "abandoned": sorted(map(list, self._abandoned))}

    def resume(self, state: Mapping[str, Any], step: int, generation: int) -> None:
        """Go on from a state; versions beyond the step are abandoned.

        Args:
            state: What `state_dict` returned; an empty one, before the first, knows what is there.
            generation: The newest whose versions beyond that step do not belong to the run.
        """
        there = set(read_evaluations(self._directory))
        # What is there beyond the step was measured by an earlier run, whatever its generation.
        self._reported = {key for key in there if key.step > step or (step and not state)}
        if state:
            fields = Fields(state, "trainer.json: evaluations")
            self._reported |= {_reported_key(entry, fields) for entry in fields.items("told")}
            self._abandoned = {_abandoned_after(entry, fields) for entry in fields.items("abandoned")}
        kept = {version for version in self._abandoned if version[0] > generation or version[1] < step}
        self._abandoned = kept | {(generation, step)}

    def all_figures(self) -> list[Means]:
        evaluations = {
            key: measured
            for key, measured in read_evaluations(self._directory).items()
            if not self._is_abandoned(key)
        }
        return [_figures(dict(its)) for _, its in groupby(evaluations.items(), key=lambda item: item[0][:2])]

    def next_figures(self) -> Means:
        if self._clock() - self._at >= EVERY:
            self._at = self._clock()
            self._look()
        return self._oldest()

    def remaining(self) -> Iterator[Means]:
        self._look()
        while figures := self._oldest():
            yield figures

    def evaluators(self) -> set[str]:
        return {os.path.basename(os.path.dirname(path)) for path in self._seen()}

    def _oldest(self) -> Means:
        if not self._pending:
            return {}
        oldest = min(self._pending)[:2]
        its = {key: self._pending.pop(key) for key in sorted(self._pending) if key[:2] == oldest}
        self._reported.update(its)
        return _figures(its)

    def _look(self) -> None:
        sizes = self._seen()
        if sizes != self._sizes:
            self._sizes = sizes
            self._pending = {
                key: measured
                for key, measured in read_evaluations(self._directory).items()
                if key not in self._reported and not self._is_abandoned(key)
            }

    def _is_abandoned(self, key: EvaluationKey) -> bool:
        return any(key.generation <= newest and key.step > last for newest, last in self._abandoned)

    def _seen(self) -> dict[str, int]:
        sizes = {}
        for path in _files(self._directory):
            with suppress(OSError):
                sizes[path] = os.stat(path).st_size
        return sizes


def _figures(version: Mapping[EvaluationKey, SetFigures]) -> Means:
    figures = {"eval/step": float(next(iter(version)).step)}
    for key, measured in version.items():
        figures |= measured.named(key.of_set)
    return figures


def _reported_key(entry: Any, fields: Fields) -> EvaluationKey:
    match entry:
        case [int(generation), int(step), str(of_set)]:
            return EvaluationKey(generation, step, of_set)
    raise fields.wrong("told", "a list of generation, step and set")


def _abandoned_after(entry: Any, fields: Fields) -> tuple[int, int]:
    match entry:
        case [int(generation), int(step)]:
            return generation, step
    raise fields.wrong("abandoned", "a list of generation and step")


def _files(directory: str) -> Iterator[str]:
    root = f"{directory}/explorers"
    with suppress(OSError):
        for name in sorted(os.listdir(root)):
            yield f"{root}/{name}/evaluations.jsonl"


def _line(document: Mapping[str, Any]) -> _Line | None:
    generation, step, of_set = document.get("generation"), document.get("step"), document.get("set", "")
    if type(generation) is not int or type(step) is not int or not isinstance(of_set, str):
        return None
    means = {
        name: float(value)
        for name, value in document.items()
        if type(value) in (int, float) and name not in _OWN
    }
    at = document.get("at")
    return _Line(
        EvaluationKey(generation, step, of_set),
        str(document.get("key", "")),
        float(at) if isinstance(at, int | float) else 0.0,
        document.get("bench") is True,
        means,
    )


def _joined(lines: Sequence[_Line]) -> SetFigures:
    key = max(lines, key=lambda line: line.at).key
    chosen = [line for line in lines if line.key == key]
    names = dict.fromkeys(name for line in chosen for name in line.means)
    means = {name: _together(name, chosen) for name in names}
    return SetFigures(means, all(line.is_bench for line in chosen))


def _together(name: str, lines: Sequence[_Line]) -> float:
    values = [(line.means[name], line.means.get("tasks", 0.0)) for line in lines if name in line.means]
    if name in _SUMS:
        return sum(value for value, _ in values)
    weights = sum(weight for _, weight in values)
    if not weights:
        return values[-1][0]
    return sum(value * weight for value, weight in values) / weights
