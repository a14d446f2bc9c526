"""How good versions are on held-out tasks, from what explorers write: JOB/explorers/<name>/evaluations.jsonl.

A line says generation and step of a version, the set, and its figures. It comes when the trainer is steps ahead, so
figures of a step have it under the names `eval/`, those of a named set under `eval/NAME/`, with the version's step in
`eval/step`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from syncd.jsonl import read
from trainer.monitors.jsonl import History

EVERY = 5.0
"""Seconds between two looks at the files."""

Means = dict[str, float]

_OWN = frozenset({"generation", "step", "at"})
"""Numbers of a line that are no figures."""

_SUMS = frozenset({"tasks", "failed", "tokens", "seconds"})
"""Figures that add up where several explorers have evaluated a version; the others are means over tasks."""


class MeasuredPlace(NamedTuple):
    """What was measured: a version, by a set, which has an empty name if it is [explorer.evaluation] itself."""

    generation: int
    step: int
    of_set: str


@dataclass(frozen=True, slots=True)
class _Line:
    place: MeasuredPlace
    key: str
    at: float
    is_bench: bool
    means: Means


@dataclass(frozen=True, slots=True)
class SetFigures:
    """The figures of a version by a set.

    Args:
        means: The figures, without the names of sets.
        is_bench: Whether only `explorer bench` has measured it. That measures steps as they are in the job, whichever
            generation published them, so the generation says nothing of what came after.
    """

    means: Means
    is_bench: bool

    def named(self, of_set: str) -> Means:
        """Return the figures by the names that metrics have."""
        prefix = f"eval/{of_set}/" if of_set else "eval/"
        return {f"{prefix}{name}": value for name, value in self.means.items()}


def read_evaluations(directory: str) -> dict[MeasuredPlace, SetFigures]:
    """Return what is known of each version and set, in order; what cannot be read is left out.

    If the settings of a set have changed (its `key`), those of the newest line count. Of several lines of one
    explorer the last one counts; means of several explorers are weighted by their tasks.
    """
    lines: dict[tuple[MeasuredPlace, str, str], _Line] = {}
    for path in _files(directory):
        with suppress(OSError):
            for document in read(path):
                line = _line(document or {})
                if line is not None:
                    lines[line.place, line.key, path] = line
    by_place = sorted(lines.values(), key=lambda line: line.place)
    return {place: _joined(list(its)) for place, its in groupby(by_place, key=lambda line: line.place)}


def evaluation_history(directory: str) -> History:
    """Return the figures by the step of the version, under the names `eval/`; after a rewind, the newer versions'."""
    found: dict[int, tuple[MeasuredPlace, Means]] = {}
    for place, measured in read_evaluations(directory).items():
        if not measured.is_bench:  # it takes back this step and later ones of earlier generations
            found = {step: its for step, its in found.items() if step < place.step or its[0][:2] == place[:2]}
        before = found[place.step][1] if place.step in found else {}
        found[place.step] = (place, before | measured.named(place.of_set))
    return History({step: means for step, (_, means) in sorted(found.items())})


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
        self._pending: dict[MeasuredPlace, SetFigures] = {}
        self._at = clock()
        self._abandoned = (0, 0)

    def abandon(self, generation: int, step: int) -> None:
        """Give nothing of versions up to a generation that are beyond a step, from which the run has resumed."""
        self._abandoned = (generation, step)

    def next_figures(self) -> Means:
        """Return the figures of the oldest version of which some were not given, empty if there is none."""
        if self._clock() - self._at >= EVERY:
            self._at = self._clock()
            self._look()
        if not self._pending:
            return {}
        oldest = min(self._pending)[:2]
        figures = {"eval/step": float(oldest[1])}
        for place in [place for place in self._pending if place[:2] == oldest]:
            self._told.add(place)
            figures |= self._pending.pop(place).named(place.of_set)
        return figures

    def _look(self) -> None:
        sizes = self._seen()
        if sizes != self._sizes:
            self._sizes = sizes
            known = read_evaluations(self._directory)
            (generation, step), told = self._abandoned, self._told
            self._pending = {
                place: measured
                for place, measured in known.items()
                if place not in told and not (place.generation <= generation and place.step > step)
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


def _line(document: Mapping[str, Any]) -> _Line | None:
    """Return a line, None of one that is none."""
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
        MeasuredPlace(generation, step, of_set),
        str(document.get("key", "")),
        float(at) if isinstance(at, int | float) else 0.0,
        document.get("bench") is True,
        means,
    )


def _joined(lines: Sequence[_Line]) -> SetFigures:
    """Return the lines of a place as one: those of the newest settings."""
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
