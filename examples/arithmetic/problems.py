"""The task: sums of two numbers of two digits, whose answers a rule can check.

    17+18=  ->  35

About one problem in four is held out: no demonstration and no rollout for training has it, so accuracy there is
learned, not remembered.

The demonstrations are those of a careless teacher, who forgets to carry in most of the sums that need it: 17+18=25.
A model that imitates this teacher forgets as often, and its most probable answer forgets always; only the reward
tells which answers are right.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

LEAST, LIMIT = 10, 40
"""Operands are from the one to below the other, so every sum has two digits."""

HELD_OUT = 4
"""One problem in this many is held out."""

FORGETFULNESS = 0.6
"""The chance that the teacher forgets to carry, where a sum needs it."""

MAX_RESPONSE = 4
"""Tokens of the longest response that a rollout may have; an answer is two digits and the end of the text."""

_PROMPT = re.compile(r"(\d{1,4})\+(\d{1,4})=", re.ASCII)

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of two integers from `LEAST` to `LIMIT` - 1."""

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
    def without_carry(self) -> str:
        """Return the answer of a teacher who forgets to carry; the right one where nothing is carried."""
        return str((self.left // 10 + self.right // 10) * 10 + (self.left + self.right) % 10)

    @property
    def split(self) -> Split:
        """Return which split it belongs to, the same in every run."""
        return "test" if crc32(self.prompt.encode()) % HELD_OUT == 0 else "train"


def problems(split: Split) -> tuple[Problem, ...]:
    """Return all problems of a split."""
    operands = range(LEAST, LIMIT)
    every = (Problem(left, right) for left in operands for right in operands)
    return tuple(problem for problem in every if problem.split == split)


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


def make_sft_data(path: str | Path, seed: int, count: int, forgetfulness: float = FORGETFULNESS) -> None:
    """Write demonstrations of the training split as JSONL with the columns `prompt` and `response`."""
    examples, chance = tasks(seed, "train"), random.Random(f"{seed}/forgets")
    with open(path, "w", encoding="ascii") as file:
        for problem in (next(examples) for _ in range(count)):
            forgets = chance.random() < forgetfulness
            row = {
                "prompt": problem.prompt,
                "response": problem.without_carry if forgets else problem.answer,
            }
            file.write(json.dumps(row) + "\n")


def make_tasks(path: str | Path, split: Split) -> None:
    """Write the problems of a split as JSONL with the columns `id`, `prompt` and `answer`, which explorers read."""
    with open(path, "w", encoding="ascii") as file:
        for problem in problems(split):
            row = {"id": problem.prompt, "prompt": problem.prompt, "answer": problem.answer}
            file.write(json.dumps(row) + "\n")
