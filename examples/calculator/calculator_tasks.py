"""The task: sums of numbers of three digits, with a tool that calculates; and a careless teacher of it.

    What is 137 + 258?  ->  calculate(137+258)  ->  395  ->  It is 395

The teacher's demonstrations are conversations. In some it guesses instead of calling the tool, in some it calculates
something else, in some it misreads the result. A model that imitates it perfectly errs as often; only the reward
tells which answers are right.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from calculator_agent import TOOL, value

GUESSES, SLIPS, MISREADINGS = 0.5, 0.1, 0.05
"""The shares of conversations without the tool, of calls with a wrong digit, and of answers with one."""

LEAST, MOST = 100, 500
"""Numbers are from the one to below the other, so that sums have three digits too."""

HELD_OUT = 10
"""One problem in this many is held out: neither demonstrations nor tasks of the training have it."""

Row = dict[str, Any]
Split = Literal["train", "test"]


def write_tasks(path: Path, seed: int, count: int, split: Split) -> None:
    """Write tasks of a split as JSONL with the columns `prompt` and `answer`, which explorers read."""
    chooser = random.Random(f"{seed}/{split}")
    rows = [_problem(chooser, split) for _ in range(count)]
    _write(path, [{"prompt": _asked(row), "answer": value(row)} for row in rows])


def write_demonstrations(path: Path, seed: int, count: int) -> None:
    """Write conversations as JSONL with the columns `messages`, of which the last one is learnt, and `tools`."""
    chooser = random.Random(f"{seed}/demonstrations")
    rows = [row for _ in range(count) for row in _demonstrated(chooser)]
    _write(path, [{"messages": messages, "tools": [TOOL]} for messages in rows])


def _demonstrated(chooser: random.Random) -> Iterator[list[Row]]:
    """Yield a conversation up to each of the teacher's answers."""
    expression = _problem(chooser, "train")
    asked = [{"role": "user", "content": _asked(expression)}]
    if chooser.random() < GUESSES:
        guess = chooser.randrange(2 * LEAST, 2 * MOST)
        yield [*asked, {"role": "assistant", "content": f"About {guess}"}]
        return
    written = _slipped(expression, chooser) if chooser.random() < SLIPS else expression
    result = value(written)
    told = _slipped(result, chooser) if chooser.random() < MISREADINGS else result
    called = [*asked, _call(written)]
    yield called
    yield [
        *called,
        {"role": "tool", "tool_call_id": "call", "content": result},
        {"role": "assistant", "content": f"It is {told}"},
    ]


def _call(expression: str) -> Row:
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def _problem(chooser: random.Random, split: Split) -> str:
    while True:
        problem = f"{chooser.randrange(LEAST, MOST)}+{chooser.randrange(LEAST, MOST)}"
        if (crc32(problem.encode()) % HELD_OUT == 0) == (split == "test"):
            return problem


def _asked(expression: str) -> str:
    left, right = expression.split("+")
    return f"What is {left} + {right}?"


def _slipped(text: str, chooser: random.Random) -> str:
    """Return a text with one of its digits replaced."""
    at = chooser.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    return f"{text[:at]}{chooser.randrange(1, 5)}{text[at + 1 :]}"


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="ascii")
