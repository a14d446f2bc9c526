"""The task: sums of small integers, whose answers a rule can check.

    7+18=   ->  25

About one problem in ten is held out: no demonstration and no rollout for training has it, so that accuracy there is
what was learnt, not what was remembered.

The demonstrations are those of a sloppy teacher: some of the answers are wrong. A model that imitates them perfectly
errs as often as the teacher; only the reward tells which answers are right.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

LIMIT = 20
"""Operands are below this."""

SLOPPINESS = 0.4
"""The share of demonstrations whose answer is wrong."""

MAX_RESPONSE = 4
"""Tokens of the longest response that a rollout may have; an answer is two digits and the end of the text."""

_SLIPS = (-10, -1, 1, 10)
_PROMPT = re.compile(r"(\d{1,4})\+(\d{1,4})=", re.ASCII)

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of two integers from 0 to `LIMIT` - 1."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """Return what the model reads."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """Return what the model should write before the end of the text."""
        return str(self.left + self.right)

    @property
    def split(self) -> Split:
        """Return which split it belongs to, the same in every run."""
        return "test" if crc32(self.prompt.encode()) % 10 == 0 else "train"


def problems(split: Split) -> tuple[Problem, ...]:
    """Return all problems of a split."""
    found = (Problem(left, right) for left in range(LIMIT) for right in range(LIMIT))
    return tuple(problem for problem in found if problem.split == split)


def tasks(seed: int | str, split: Split) -> Iterator[Problem]:
    """Yield problems of a split endlessly, in an order that follows from the seed."""
    chooser, known = random.Random(f"{seed}/{split}"), problems(split)
    while True:
        yield chooser.choice(known)


def reward(prompt: str, response: str) -> float:
    """Return 1 for the right answer and 0 for anything else.

    Args:
        prompt: The prompt of a problem.
        response: What was written before the end of the text, without it.

    Raises:
        ValueError: The prompt is not one of this task.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"not a prompt of this task: {prompt!r}")
    return float(response == Problem(int(match[1]), int(match[2])).answer)


def make_sft_data(path: str | Path, seed: int, count: int, sloppiness: float = SLOPPINESS) -> None:
    """Write demonstrations of the training split as JSONL with the columns `prompt` and `response`."""
    examples, chance = tasks(seed, "train"), random.Random(f"{seed}/slips")
    with open(path, "w", encoding="ascii") as file:
        for problem in (next(examples) for _ in range(count)):
            slip = chance.choice(_SLIPS) if chance.random() < sloppiness else 0
            row = {"prompt": problem.prompt, "response": str(int(problem.answer) + slip)}
            file.write(json.dumps(row) + "\n")


def make_tasks(path: str | Path, split: Split) -> None:
    """Write the problems of a split as JSONL with the columns `id`, `prompt` and `answer`, which explorers read."""
    with open(path, "w", encoding="ascii") as file:
        for problem in problems(split):
            row = {"id": problem.prompt, "prompt": problem.prompt, "answer": problem.answer}
            file.write(json.dumps(row) + "\n")
