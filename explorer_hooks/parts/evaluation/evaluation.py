"""How good versions are on held-out tasks: one line for each set and each version that is measured."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from explorer_hooks.parts.evaluation.sets import figures_of, open_sets
from explorer_hooks.run.generation import GroupRequest, GroupResult, Response, Sampling, scored_group
from explorer_hooks.run.held_out import Evaluator, HeldOut, Outcomes, TaskOutcome, warn_skipped
from explorer_hooks.run.own_files import Records
from explorer_hooks.run.scoring import Scorer
from syncd.jobfile.model import JobFile
from syncd.protocol.version import Pair

_ATTEMPTS = 3


class PromptEvaluator:
    """Has the engine answer each prompt."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def outcomes(self, held_out: HeldOut, pair: Pair) -> Outcomes | None:
        for _ in range(_ATTEMPTS):
            groups = self._groups(held_out)
            if groups is None:
                return None
            are_of_pair = all((group.first, group.last) == (pair, pair) or group.problem for group in groups)
            if are_of_pair and not any(group.retry for group in groups):
                return _outcomes(held_out, groups)
        warn_skipped(held_out, pair)
        return None

    def _groups(self, held_out: HeldOut) -> list[GroupResult] | None:
        section, requests = held_out.section, dict[int, GroupRequest]()
        groups: list[GroupResult] = []
        for number, task in enumerate(held_out.tasks):
            try:
                prompt = self._sampling.tokens.encode(task.prompt)
            except ValueError as error:
                groups.append(GroupResult(number, problem=str(error)))
                continue
            requests[number] = GroupRequest(prompt, section.samples, held_out.max_tokens, section.temperature)
        numbers = list(requests)
        with closing(self._sampling.generator.generate(list(requests.values()))) as coming:
            groups += [replace(group, index=numbers[group.index]) for group in coming if group is not None]
        return None if self._sampling.stop() else sorted(groups, key=lambda group: group.index)


class Evaluation:
    """Measures each set at every n-th applied version and at the last one, but nothing that `records` has already."""

    def __init__(self, sets: Sequence[HeldOut], records: Records, evaluator: Evaluator) -> None:
        self._sets, self._records, self._evaluator = sets, records, evaluator
        visited = ((line.get("generation"), line.get("step"), line.get("set", "")) for line in records.all())
        self._visited: set[tuple[Any, Any, Any]] = set(visited)
        self._since = {held_out.name: held_out.section.every for held_out in sets}

    def applied(self, pair: Pair, digest: str, *, is_last: bool = False) -> None:
        for held_out in self._sets:
            visit = (*pair, held_out.name)
            if visit in self._visited:
                self._since[held_out.name] = 1
            elif not is_last and self._since[held_out.name] < held_out.section.every:
                self._since[held_out.name] += 1
            elif measure(held_out, pair, digest, self._evaluator, self._records):
                self._since[held_out.name] = 1
                self._visited.add(visit)


class RunSets:
    def __init__(self, sets: Sequence[HeldOut]) -> None:
        self._sets = sets

    @property
    def scorers(self) -> Sequence[Scorer]:
        return [held_out.scorer for held_out in self._sets]

    def watcher(self, evaluator: Evaluator, records: Records) -> Evaluation | None:
        return Evaluation(self._sets, records, evaluator) if self._sets else None

    def watcher_by_prompts(self, sampling: Sampling, records: Records) -> Evaluation | None:
        return self.watcher(PromptEvaluator(sampling), records)


@contextmanager
def open_run_sets(file: JobFile, scorer: Scorer) -> Iterator[RunSets]:
    """Yield the sets of a file that are measured in a run: those with `every` above 0."""
    with open_sets(file, scorer, lambda _, section: bool(section.every)) as sets:
        yield RunSets(sets)


def measure(
    held_out: HeldOut,
    pair: Pair,
    digest: str,
    evaluator: Evaluator,
    records: Records,
    more: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """Return the line of a set and a version, and write it; None if not measured. A start model has no digest."""
    begin = time.monotonic()
    outcomes = evaluator.outcomes(held_out, pair)
    if outcomes is None:
        return None
    line = {**_line(held_out, pair, digest, outcomes, time.monotonic() - begin), **(more or {})}
    records.add(line)
    return line


def _line(held_out: HeldOut, pair: Pair, digest: str, outcomes: Outcomes, seconds: float) -> dict[str, Any]:
    scored = sum(bool(outcome.rewards) for outcome in outcomes)
    name = {"set": held_out.name} if held_out.name else {}
    return {
        "generation": pair[0],
        "step": pair[1],
        **name,
        "key": held_out.key,
        "digest": digest,
        **figures_of(held_out.section, outcomes),
        "tasks": scored,
        "failed": len(held_out.tasks) - scored,
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "seconds": round(seconds, 3),
        "at": time.time(),
    }


def _outcomes(held_out: HeldOut, groups: Sequence[GroupResult]) -> list[TaskOutcome]:
    """Return what became of each task; all groups are scored at once, since processes score side by side."""
    asked = [(held_out.tasks[group.index], group.responses) for group in groups]
    scored = held_out.scorer.score([scored_group(task, responses) for task, responses in asked])
    rewards = ([score.reward for score in scores] for scores in scored)
    return [_outcome(responses, values) for (_, responses), values in zip(asked, rewards, strict=True)]


def _outcome(responses: Sequence[Response], rewards: Sequence[float | None]) -> TaskOutcome:
    scored = [reward for reward in rewards if reward is not None]
    tokens = sum(len(response.tokens) for response in responses)
    truncated = sum(response.truncated for response in responses)
    return TaskOutcome(scored if len(scored) == len(rewards) else (), tokens, truncated)
