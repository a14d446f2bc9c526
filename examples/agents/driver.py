"""Plays sums with a tool against `explorer serve`: a driver and its agent in one program.

    python examples/agents/driver.py http://127.0.0.1:8100 TOKEN_FILE --groups 4

The event `gateway_serving` of `explorer serve` names the address and the token file. `pip install openai`.
"""

import argparse
import json
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai

TOO_MANY = 429
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}},
    },
}


def agent(client: openai.OpenAI, question: str) -> str:
    """Answer a question in at most three turns; the model may call the tool."""
    history: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        try:
            done = client.chat.completions.create(model="policy", messages=history, tools=[TOOL])
        except openai.BadRequestError:  # the history is too long for another turn
            if len(history) == 1:
                raise  # no first turn: that is an error
            break
        message = done.choices[0].message
        history.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        history += [
            {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}
            for call in message.tool_calls
        ]
    return ""


def added(arguments: str) -> str:
    """Return what the tool answers; the model may have written anything."""
    try:
        return str(sum(json.loads(arguments)["numbers"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def main() -> None:
    """Play groups of the same sum, each rollout in a session of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("token_file")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--size", type=int, default=2, help="data.group_size of the job")
    options = parser.parse_args()
    token = Path(options.token_file).expanduser().read_text().strip()

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(options.url + path, json.dumps(body).encode(), headers)
        while True:
            try:
                return json.load(urllib.request.urlopen(request, timeout=600))
            except urllib.error.HTTPError as error:
                if error.code != TOO_MANY:
                    raise
                time.sleep(1)  # the trainer needs no further group yet

    for _ in range(options.groups):
        left, right, group = random.randrange(50), random.randrange(50), f"{random.getrandbits(64):x}"
        for rollout in range(options.size):
            session = post("/sessions", {"group": group, "task": f"{left}+{right}", "rollout": rollout})
            with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
                answer = agent(client, f"What is {left} + {right}?")
            reward = float(str(left + right) in answer)
            post(f"/s/{session['session']}/reward", {"reward": reward})
            print(f"{left} + {right}: {answer!r}, reward {reward:g}")


if __name__ == "__main__":
    main()
