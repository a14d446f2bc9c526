"""The reward `math_verify`, called in a process of its own: the library needs the main thread, and may hang."""

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from explorer_hooks.run.rewards import expected_answer

_SHOWN = 80


def score(response: str, task: Mapping[str, Any]) -> float:
    """Return 1 if math_verify finds the task's answer in the response, else 0."""
    answer = expected_answer(task)
    expected = parse(f"\\boxed{{{answer}}}")
    if not expected:
        raise ValueError(f"math_verify cannot read the task's answer: {answer[:_SHOWN]!r}")
    return float(verify(expected, parse(response)))
