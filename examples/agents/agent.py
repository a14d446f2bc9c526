"""An agent for `[explorer.agent] function = "agent:run"`: it answers, is asked to check, and answers again."""

from typing import Any

import openai


def run(base_url: str, api_key: str, task: dict[str, Any]) -> float:
    """Play a task, and return the reward of its last answer."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        history: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for following in ("Check it, and write the number alone.", None):
            try:
                done = client.chat.completions.create(model="policy", messages=history)
            except openai.BadRequestError:  # the history is too long for another turn
                if len(history) == 1:
                    raise  # no first turn: that is an error
                return 0.0
            answer = done.choices[0].message.content or ""
            history += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
        return float(answer.strip() == str(task["answer"]))
