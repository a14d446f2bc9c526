"""What a response is worth: the built-in functions, and what a function of one's own may return."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from explorer_hooks.explorer.answers import final_answer, same_answer
from explorer_hooks.explorer.tasks import Task

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one rollout.

    Args:
        reward: Its reward; None where there is none, for `problem`.
        info: What else the function says of it.
        problem: Why there is no reward: what was raised, not a number, timed out, died.
    """

    reward: float | None
    info: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


Reward = Callable[[str, str, Mapping[str, Any]], Any]
"""Called with `prompt`, `response` and `task`; returns a number, or a mapping with `reward` and anything else."""


def exact_match(prompt: str, response: str, task: Mapping[str, Any]) -> float:  # noqa: ARG001 - as all are called
    """Return 1 where the response is the task's answer, spaces at both ends aside, else 0."""
    return float(response.strip() == _answer(task).strip())


def math_reward(prompt: str, response: str, task: Mapping[str, Any]) -> float:  # noqa: ARG001 - as all are called
    """Return 1 where the final answer of the response is the task's, else 0.

    The answer of the task may itself be a worked solution, as data sets have it.
    """
    given, expected = final_answer(response), _answer(task)
    if given is None:
        return 0.0
    worked = "\\boxed{" in expected or "####" in expected
    return float(same_answer(given, (final_answer(expected) or expected) if worked else expected))


BUILT_IN: Mapping[str, Reward] = {"exact_match": exact_match, "math": math_reward}


def plain_task(task: Task) -> dict[str, Any]:
    """Return a task as reward functions see it: `id`, `prompt`, `answer` and the other fields of its line."""
    return {**task.info, "id": task.id, "prompt": task.prompt, "answer": task.answer}


def score_of(returned: object) -> Score:
    """Return the score that a function's result means; what is no finite number is a problem, not an error."""
    info: Mapping[str, Any] = {}
    if isinstance(returned, Mapping):
        info = {str(name): value for name, value in returned.items() if name != "reward"}
        returned = returned.get("reward")
    try:
        reward = float(returned)  # type: ignore[arg-type] # whatever it is: numpy's numbers and booleans too
    except (TypeError, ValueError, OverflowError):
        return Score(None, problem=f"it returned no number but {type(returned).__name__}")
    if not math.isfinite(reward):
        return Score(None, problem=f"it returned {reward}")
    return Score(reward, _only_json(info))


def _only_json(info: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        # Plain data, whatever classes the function has its numbers from.
        plain: Mapping[str, Any] = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return {name: repr(value)[:_SHOWN] for name, value in info.items()}
    return plain


def _answer(task: Mapping[str, Any]) -> str:
    answer = task.get("answer")
    return answer if isinstance(answer, str) else json.dumps(answer)
