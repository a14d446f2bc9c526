"""Scores responses: built-in functions here, others in processes of their own; one function or several, weighted."""

import importlib.util
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from explorer_hooks.run.function_processes import FunctionProcesses, Signature
from explorer_hooks.run.rewards import BUILT_IN, LIBRARY, Score, combined, score_of
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.explorer_sections import RewardSection

AUTO = "auto"
"""The function that scores tasks of reasoning_gym as it does, and compares others with their answer."""

_GYM, _PLAIN = "reasoning_gym", "exact_match"
_ONE = frozenset({"prompt", "response", "task", "tokens", "truncated"})
_GROUP = frozenset({"prompt", "responses", "task", "tokens", "truncated"})
_LONGEST = 60.0  # seconds of a pause before a function is called again, at most

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ScoredText:
    text: str  # the response
    tokens: int = 0  # how many tokens it has
    truncated: bool = False  # whether it was cut off


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    prompt: str  # the prompt as text
    task: Mapping[str, Any]
    responses: tuple[ScoredText, ...]


class Scorer(Protocol):
    @property
    def needs_groups(self) -> bool:
        """Return whether it compares the responses of a group."""

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[Score]]:
        """Return the scores of each group, in order; a function that fails gives scores without a reward."""

    def close(self) -> None:
        """End the processes."""


def open_scorer(section: RewardSection, directories: Sequence[str] = ()) -> Scorer:
    if not section.functions:
        return _open_one(section.function, section, directories)
    opened: dict[str, Scorer] = {}
    try:
        for name, function in section.parts.items():
            opened[name] = _open_one(function, section, directories)
    except BaseException:
        _close(opened.values())
        raise
    weights = dict(zip(section.parts, section.functions.values(), strict=True))
    return WeightedScorer(opened, weights)


def _open_one(function: str, section: RewardSection, directories: Sequence[str]) -> Scorer:
    if function == AUTO:
        return AutoScorer(section, directories)
    if function in BUILT_IN:
        return BuiltInScorer(function)
    if function in LIBRARY:
        if importlib.util.find_spec(function) is None:
            hint = install_command("tasks")
            raise ConfigError(f"the library of the reward {function} is not installed", hint=hint)
        function = LIBRARY[function]
    return FunctionScorer(function, section, directories)


def _close(scorers: Iterable[Scorer]) -> None:
    for scorer in scorers:
        scorer.close()


class BuiltInScorer:
    needs_groups = False

    def __init__(self, function: str) -> None:
        self._function = BUILT_IN[function]

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[Score]]:
        return [
            [
                score_of(self._function(group.prompt, response.text, group.task))
                for response in group.responses
            ]
            for group in groups
        ]

    def close(self) -> None:
        """Do nothing."""


class AutoScorer:
    """Scores tasks of reasoning_gym as it does, other responses by the task's answer. Several threads call it."""

    needs_groups = False

    def __init__(self, section: RewardSection, directories: Sequence[str]) -> None:
        self._section, self._directories = section, directories
        self._plain = BuiltInScorer(_PLAIN)
        self._gym: Scorer | None = None
        self._opening = threading.Lock()

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[Score]]:
        generated = [group for group in groups if _GYM in group.task]
        others = iter(self._plain.score([group for group in groups if _GYM not in group.task]))
        scored = iter(self._opened().score(generated) if generated else [])
        return [next(scored if _GYM in group.task else others) for group in groups]

    def close(self) -> None:
        if self._gym is not None:
            self._gym.close()

    def _opened(self) -> Scorer:
        with self._opening:
            if self._gym is None:
                self._gym = _open_one(_GYM, self._section, self._directories)
            return self._gym


class FunctionScorer:
    """Scores with `package.module:function`, in processes; the function gets those arguments that it has by name."""

    def __init__(self, function: str, section: RewardSection, directories: Sequence[str]) -> None:
        self._function, self._retries, self._pause = function, section.retries, section.pause
        self._processes = FunctionProcesses(function, section.timeout, section.workers, directories)
        self._threads = ThreadPoolExecutor(section.workers, thread_name_prefix="reward")
        self._closed = threading.Event()
        signature = self._processes.signature
        self.needs_groups = "responses" in signature.names
        self._arguments = _GROUP if self.needs_groups else _ONE
        if unknown := sorted(set(signature.required) - self._arguments):
            self.close()
            hint = f"def {function.rpartition(':')[2]}(prompt, response, task), or (prompt, responses, task)"
            raise ConfigError(
                f"the function {function} cannot be used: syncd does not pass it {unknown[0]}", hint=hint
            )
        self._named = _named(signature, self._arguments)

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[Score]]:
        calls = [call for group in groups for call in self._calls(group)]
        in_order = iter([score for scores in self._threads.map(self._call, calls) for score in scores])
        return [[next(in_order) for _ in group.responses] for group in groups]

    def close(self) -> None:
        self._closed.set()
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _calls(self, group: ScoredGroup) -> list[tuple[dict[str, Any], int | None]]:
        shared = {"prompt": group.prompt, "task": dict(group.task)}
        if self.needs_groups:
            texts = [response.text for response in group.responses]
            sizes = [response.tokens for response in group.responses]
            cuts = [response.truncated for response in group.responses]
            whole = {**shared, "responses": texts, "tokens": sizes, "truncated": cuts}
            return [(self._chosen(whole), len(texts))]
        each = [
            {"response": response.text, "tokens": response.tokens, "truncated": response.truncated}
            for response in group.responses
        ]
        return [(self._chosen({**shared, **own}), None) for own in each]

    def _chosen(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name in self._named}

    def _call(self, call: tuple[dict[str, Any], int | None]) -> list[Score]:
        scores = self._processes.call(*call)
        for attempt in range(self._retries):
            problem = next((score.problem for score in scores if score.problem), "")
            pause = min(self._pause * 2**attempt, _LONGEST)
            if not problem or self._closed.wait(pause):
                return scores
            _LOG.warning("reward_tried_again", function=self._function, attempt=attempt + 2, problem=problem)
            scores = self._processes.call(*call)
        return scores


class WeightedScorer:
    def __init__(self, parts: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self._parts, self._weights = parts, weights
        self.needs_groups = any(part.needs_groups for part in parts.values())

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[Score]]:
        """Return the scores of each group; what each function says is in the info."""
        by_part = {name: part.score(groups) for name, part in self._parts.items()}
        return [
            [
                combined({name: scores[at][number] for name, scores in by_part.items()}, self._weights)
                for number in range(len(group.responses))
            ]
            for at, group in enumerate(groups)
        ]

    def close(self) -> None:
        _close(self._parts.values())


def _named(signature: Signature, arguments: frozenset[str]) -> frozenset[str]:
    return arguments if signature.takes_any else arguments & set(signature.names)
