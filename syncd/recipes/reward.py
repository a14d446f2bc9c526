"""What a response is worth: `explorer run` calls `score` for each one, in a process of its own."""

from typing import Any


def score(prompt: str, response: str, task: dict[str, Any]) -> float | dict[str, Any]:
    """Return the reward of a response: here 1 if it is the task's answer, else 0.

    Args:
        prompt: What the model was asked.
        response: What it wrote.
        task: The task's line in tasks.jsonl, with `id`, `prompt`, `answer` and all that you put there.

    Returns:
        A finite number, or a mapping with `reward` and anything else, which experiences keep.
    """
    del prompt
    return {"reward": float(response.strip() == str(task["answer"])), "length": len(response)}
