"""Rewards: the built-in functions, and the score that the result of a user's function means.

The mathematical reward finds the final answer of a response and compares it with the task's. It evaluates nothing
and is bounded: texts beyond `MAX_ANSWER` characters and numbers beyond `MAX_DIGITS` digits are compared as text, and
every pattern here runs in time linear in its text.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from explorer_hooks.tasks.task import Task

MAX_PROBLEM = 400  # characters of what went wrong in a process

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Score:
    reward: float | None  # its reward; None if there is a `problem`
    info: Mapping[str, Any] = field(default_factory=dict)  # what else the function returned
    problem: str = ""  # why there is no reward: what was raised, not a number, timed out, died


Reward = Callable[[str, str, Mapping[str, Any]], Any]
"""Called with `prompt`, `response` and `task`; returns a number, or a mapping with `reward` and anything else."""


def exact_match(prompt: str, response: str, task: Mapping[str, Any]) -> float:  # noqa: ARG001 - as all are called
    """Return 1 if the response is the task's answer, apart from spaces at both ends, else 0."""
    return float(response.strip() == _answer(task).strip())


def math_reward(prompt: str, response: str, task: Mapping[str, Any]) -> float:  # noqa: ARG001 - as all are called
    """Return 1 if the final answer of the response is that of the task, which may be a worked solution, else 0."""
    answer = final_answer(response)
    return 0.0 if answer is None else float(same_answer(answer, expected_answer(task)))


def expected_answer(task: Mapping[str, Any]) -> str:
    """Return a task's answer: of a worked solution its final one."""
    expected = _answer(task)
    worked = "\\boxed{" in expected or "####" in expected
    return (final_answer(expected) or expected) if worked else expected


BUILT_IN: Mapping[str, Reward] = {"exact_match": exact_match, "math": math_reward}
"""What is called in the explorer's process."""

LIBRARY: Mapping[str, str] = {
    name: f"explorer_hooks.run.reward_{name}:score" for name in ("math_verify", "reasoning_gym")
}
"""What is called in a process of its own; the name is that of the library that it needs."""


def plain_task(task: Task) -> dict[str, Any]:
    """Return a task as reward functions get it: `id`, `prompt`, `answer` and the other fields of its line."""
    return {**task.info, "id": task.id, "prompt": task.prompt, "answer": task.answer}


def score_of(returned: object) -> Score:
    """Return the score that a function's result means; anything but a finite number is a problem, not an error."""
    info: Mapping[str, Any] = {}
    if isinstance(returned, Mapping):
        info = {str(name): value for name, value in returned.items() if name != "reward"}
        returned = returned.get("reward")
    problem = f"it returned {type(returned).__name__} instead of a number"
    if isinstance(returned, str | bytes | bytearray):  # float would read "0.7"
        return Score(None, problem=problem)
    try:
        reward = float(returned)  # type: ignore[arg-type] # whatever it is: numpy's numbers and booleans too
    except (TypeError, ValueError, OverflowError):
        return Score(None, problem=problem)
    if not math.isfinite(reward):
        return Score(None, problem=f"it returned {reward}")
    return Score(reward, _only_json(info))


def rebuilt(said: object) -> Score:
    """Return the score that a process wrote as JSON: `reward` and `info`, or a `problem`."""
    if not isinstance(said, Mapping):
        return Score(None, problem="its process wrote something that is no score")
    if "problem" in said:
        return Score(None, problem=str(said["problem"])[:MAX_PROBLEM])
    info = said.get("info")
    return score_of({**(info if isinstance(info, Mapping) else {}), "reward": said.get("reward")})


def scores_of(returned: object, count: int) -> list[Score]:
    """Return the scores that a function's result means for a group: a list with one for each response."""
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        problem = f"it returned {type(returned).__name__} instead of a list for the group"
    elif len(returned) != count:
        problem = f"it returned {len(returned)} rewards for {count} responses"
    else:
        return [score_of(entry) for entry in returned]
    return [Score(None, problem=problem)] * count


def combined(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Return the weighted sum of what several functions say of a response; info has each one's reward."""
    info: dict[str, Any] = {}
    reward = 0.0
    for name, score in parts.items():
        if score.reward is None:
            return Score(None, problem=f"{name}: {score.problem}")
        reward += weights[name] * score.reward
        info[name] = score.reward
        info |= {f"{name}.{key}": value for key, value in score.info.items()}
    if not math.isfinite(reward):
        return Score(None, problem=f"the weighted sum is {reward}")
    return Score(reward, info)


def _only_json(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info as plain data; a value that JSON does not have, such as NaN or a set, becomes text by itself."""
    plain = {}
    for name, value in info.items():
        try:
            plain[name] = _plain(value, frozenset())
        except (ArithmeticError, RecursionError, TypeError, ValueError):
            plain[name] = _shown(value)
    return plain


def _plain(value: Any, above: frozenset[int]) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        inside = above | {id(value)}
    if isinstance(value, Mapping) and id(value) not in above:
        return {str(key): _plain(element, inside) for key, element in value.items()}
    if isinstance(value, list | tuple) and id(value) not in above:
        return [_plain(element, inside) for element in value]
    if isinstance(value, Real) and math.isfinite(value):
        return int(value) if isinstance(value, Integral) else float(value)
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)[:_SHOWN]
    except RecursionError:
        return f"<{type(value).__name__}>"


def _answer(task: Mapping[str, Any]) -> str:
    answer = task.get("answer")
    return answer if isinstance(answer, str) else json.dumps(answer)


MAX_RESPONSE = 1 << 18  # characters of a response that are read, from its end

MAX_ANSWER = 1000
MAX_DIGITS = 300

_BOXED = ("\\boxed{", "\\fbox{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_RATIOS = (
    re.compile(r"([-+]?)(\d+)/([-+]?\d+)", re.ASCII),
    re.compile(r"([-+]?)\\[dt]?frac(\d)(\d)", re.ASCII),
    re.compile(r"([-+]?)\\[dt]?frac\{?([-+]?\d+)\}?\{?([-+]?\d+)\}?", re.ASCII),
)
_POWER = re.compile(r"([-+]?\d+(?:\.\d+)?)(?:\\times|\\cdot|\*)10\^\{?([-+]?\d{1,3})\}?", re.ASCII)
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,3})", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}")
_DROPPED = (
    *(("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\;", ""), ("\\ ", ""), ("\\$", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\%", "%"), ("{,}", ","), ("\u2212", "-"), ("$", "")),
    *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\(", ""), ("\\)", ""), ("\\[", ""), ("\\]", "")),
)


def final_answer(response: str) -> str | None:
    """Return the last answer in a response: what it boxes, else what follows ####, else its last number."""
    text = response[-MAX_RESPONSE:]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if hashes := _HASHES.findall(text):
        return str(hashes[-1]).strip()
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]).rstrip(",") if numbers else None


def same_answer(answer: str, expected: str) -> bool:
    """Return whether two answers are equal: as numbers if both are numbers, else as normalised text."""
    left, right = normalised(answer), normalised(expected)
    if left == right:
        return bool(left)
    return _same_number(left, right) or _same_parts(left, right)


def normalised(answer: str) -> str:
    """Return an answer without what does not change its meaning: spaces, dollars, units in text, LaTeX sizes."""
    text = answer[: MAX_ANSWER + 1].strip()
    for old, new in _DROPPED:
        text = text.replace(old, new)
    text = _TEXT.sub(r"\1", text)
    text = "".join(text.split()).rstrip(".")
    left, equals, right = text.rpartition("=")
    if equals and len(left) == 1 and left.isalpha():
        text = right
    return text.lower() if len(text) <= MAX_ANSWER else answer


def number(text: str) -> Fraction | None:
    """Return the exact number that a normalised answer is; None if it is no number, or too long."""
    if len(text) > MAX_DIGITS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    ratio = _ratio(text)
    return _power(text) if ratio is None else ratio


def _same_number(left: str, right: str) -> bool:
    """Return whether both are the same number; a percentage equals its number, and its hundredth."""
    value, other = number(left.removesuffix("%")), number(right.removesuffix("%"))
    if value is None or other is None:
        return False
    percent = left.endswith("%") - right.endswith("%")
    return value == other or (percent != 0 and value == other * Fraction(100) ** percent)


def _ratio(text: str) -> Fraction | None:
    match = next(filter(None, (ratio.fullmatch(text) for ratio in _RATIOS)), None)
    if match is None or int(match[3]) == 0:
        return None
    return Fraction(int(match[2]), int(match[3])) * (-1 if match[1] == "-" else 1)


def _power(text: str) -> Fraction | None:
    match = _POWER.fullmatch(text) or _SCIENTIFIC.fullmatch(text)
    return Fraction(match[1]) * Fraction(10) ** int(match[2]) if match else None


def _same_parts(left: str, right: str) -> bool:
    """Return whether two tuples or intervals have the same ends and the same parts."""
    if not (left and right and left[0] == right[0] and left[-1] == right[-1] and left[0] in "([{"):
        return False
    ours, theirs = left[1:-1].split(","), right[1:-1].split(",")
    same = (part == other or _same_number(part, other) for part, other in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) > 1 and all(same)


def _last_boxed(text: str) -> str | None:
    starts = [(text.rfind(mark), len(mark)) for mark in _BOXED]
    start, length = max(starts)
    if start < 0:
        return None
    depth = 1
    for at in range(start + length, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + length : at]
    return None
