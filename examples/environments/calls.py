"""Demonstrations of a careless teacher for the environment `calculator`: conversations with calls of its tool.

In half of them it guesses instead of calling the tool, in some it calculates something else, in some it misreads the
result.
"""

import json
import operator
import random
from collections.abc import Iterator
from typing import Any

GUESSES, SLIPS, MISREADINGS = 0.5, 0.1, 0.05
"""The shares of conversations without the tool, of calls with a wrong digit, and of answers with one."""

Row = dict[str, Any]
_SIGNS = {"+": operator.add, "*": operator.mul}


def demonstrations(seed: int, count: int) -> Iterator[list[Row]]:
    """Yield so many conversations, each up to each of the teacher's answers: the last message is what is learnt."""
    chooser = random.Random(f"{seed}/demonstrations")
    for _ in range(count):
        left, sign, right = chooser.randrange(10, 100), chooser.choice("+*"), chooser.randrange(10, 100)
        asked = [{"role": "user", "content": f"What is {left} {sign} {right}?"}]
        expression = f"{left}{sign}{right}"
        if chooser.random() < GUESSES:
            digits = len(_value(expression))
            guess = str(chooser.randrange(10 ** (digits - 1), 10**digits))
            yield [*asked, {"role": "assistant", "content": guess}]
            continue
        written = _slipped(expression, chooser) if chooser.random() < SLIPS else expression
        result = _value(written)
        told = _slipped(result, chooser) if chooser.random() < MISREADINGS else result
        called = [*asked, _call(written)]
        yield called
        tool = {"role": "tool", "tool_call_id": "call", "content": result}
        yield [*called, tool, {"role": "assistant", "content": told}]


def _call(expression: str) -> Row:
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    call = {"id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _value(expression: str) -> str:
    sign = "+" if "+" in expression else "*"
    left, right = expression.split(sign)
    return str(_SIGNS[sign](int(left), int(right)))


def _slipped(text: str, chooser: random.Random) -> str:
    """Return a text with one of its digits replaced."""
    at = chooser.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    return f"{text[:at]}{chooser.randrange(1, 10)}{text[at + 1 :]}"
