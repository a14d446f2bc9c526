"""An agent with a calculator, for `[explorer.agent] function = "calculator_agent:run"`: the `openai` client as it is.

The model is asked for a sum. It may call the tool, gets its result, and answers with the number.
"""

import json
import re
from typing import Any

import openai

TURNS = 3
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Returns the value of a sum.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}

_EXPRESSION = re.compile(r"(\d{1,4})\+(\d{1,4})", re.ASCII)


def run(base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, float]:
    """Play a task; return 1 as its reward if the last answer has the number, and whether the tool was called."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        history: list[Any] = [{"role": "user", "content": task["prompt"]}]
        called = False
        for _ in range(TURNS):
            try:
                done = client.chat.completions.create(model="policy", messages=history, tools=[TOOL])
            except openai.BadRequestError:  # the history is too long for another turn
                if len(history) == 1:
                    raise  # no first turn: that is an error
                break
            message = done.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                said = re.findall(r"\d+", message.content or "")
                return {"reward": float(said[-1:] == [task["answer"]]), "called": float(called)}
            called = True
            history += [
                {"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)}
                for call in message.tool_calls
            ]
        return {"reward": 0.0, "called": float(called)}


def calculated(arguments: str) -> str:
    """Return what the tool answers; the model may have written anything."""
    try:
        return value(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error"


def value(expression: str) -> str:
    """Return the value of a sum of two numbers.

    Raises:
        ValueError: It is none.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError(f"not a sum: {expression!r}")
    return str(int(match[1]) + int(match[2]))
