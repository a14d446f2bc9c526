"""The evaluation sets of the job's file, and the names of the figures that each one produces.

Explorers measure them; the trainer compares steps by them (`[selection]`), so both read these keys.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from syncd.jobfile.problems import Problem
from syncd.jobfile.sections import CODE_BY_NAME, TASKS, Count, NoneText, Positive, Section

PREFIX = "eval/"  # how the names of the figures of all sets begin

_ALWAYS = ("reward", "reward_stderr", "tasks", "failed", "truncated", "tokens", "seconds")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_SAMPLES = 1024


class EvaluationSet(Section):
    """Held-out tasks, and how they are measured."""

    tasks: str = Field(default="", json_schema_extra=TASKS)
    """The held-out tasks: a source as of explorer.tasks, or set:NAME of [[explorer.task_sets]]; none unless given."""
    every: Count = 1
    """Versions from one evaluation to the next; 0 for none: then only `explorer bench` measures it."""
    limit: Count = 0
    """Tasks of the file that are used, from its beginning; 0 for all."""
    samples: Annotated[int, Field(ge=1, le=_MOST_SAMPLES)] = 1
    """Responses to each task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """At which tokens are drawn from the whole distribution; 0 for the most probable token."""
    max_tokens: Positive | NoneText = None
    """Tokens of a response at most; explorer.sampling.max_tokens unless given."""
    reward: str = Field(default="", json_schema_extra=CODE_BY_NAME)
    """The reward function, as of explorer.reward.function, which it is unless given."""
    correct: float | NoneText = None
    """The reward from which on a response is correct; none: no pass@k."""
    k: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """The k of pass@k and best@k; 1 and `samples` unless given."""

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.k} or {1, self.samples}))

    def figure_names(self) -> tuple[str, ...]:
        """Return the names of its figures, without the set's own."""
        passed = [pass_name(k) for k in self.ks if self.correct is not None]
        best = [best_name(k) for k in self.ks if k > 1]
        return (*_ALWAYS, *passed, *best)


class EvaluationSection(EvaluationSet):
    """Rollouts of held-out tasks, greedy ones unless a set says more. Named sets are in tables of their own."""

    sets: dict[str, EvaluationSet] = Field(default_factory=dict)
    """Further sets by name, each in a table [explorer.evaluation.sets.NAME]."""

    def named(self) -> Mapping[str, EvaluationSet]:
        """Return all sets that have tasks by name; the one of the table itself has an empty name."""
        return {name: section for name, section in (("", self), *self.sets.items()) if section.tasks}


def pass_name(k: int) -> str:
    return f"pass_at_{k}"


def best_name(k: int) -> str:
    return f"best_at_{k}"


def produced_by(explorer: Section) -> tuple[str, ...] | None:
    """Return the names of the figures that the sets of an [explorer] table produce in a run.

    None if the table says nothing of evaluations: explorers may have a file of their own.
    """
    if "evaluation" not in explorer.model_fields_set:
        return None
    named = explorer.part(EvaluationSection).named()
    sets = (
        (f"{PREFIX}{name}/" if name else PREFIX, evaluation_set)
        for name, evaluation_set in named.items()
        if evaluation_set.every
    )
    return tuple(
        f"{prefix}{figure}" for prefix, evaluation_set in sets for figure in evaluation_set.figure_names()
    )


def set_problems(section: EvaluationSection) -> Iterator[Problem]:
    """Yield what is wrong with sets and no single key shows."""
    yield from _problems("explorer.evaluation", section)
    for name, evaluation_set in section.sets.items():
        key = f"explorer.evaluation.sets.{name}"
        if not _NAME.fullmatch(name) or name in (*section.figure_names(), "step"):
            hint = "letters, digits, '_' and '-', 64 at most, and not the name of a figure"
            yield Problem(key, f"{name[:80]!r} is not a name of an evaluation set", hint)
        if not evaluation_set.tasks:
            yield Problem(f"{key}.tasks", f"{key}.tasks is missing", "it names a JSONL file of tasks")
        yield from _problems(key, evaluation_set)


def _problems(key: str, section: EvaluationSet) -> Iterator[Problem]:
    if section.samples > 1 and not section.temperature:
        text = f"{key}.samples = {section.samples} at temperature 0 would all be the same response"
        yield Problem(f"{key}.temperature", text, "temperature = 1.0, or samples = 1")
    if section.ks[-1] > section.samples:
        text = f"{key}.k has {section.ks[-1]}, and there are {section.samples} responses to a task"
        yield Problem(f"{key}.k", text, f"samples = {section.ks[-1]}")
