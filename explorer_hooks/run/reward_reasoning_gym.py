"""The reward of tasks that reasoning_gym has generated, called in a process of its own: some of it may hang."""

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the parser, about packages that it needs
    import reasoning_gym
    from reasoning_gym.utils import extract_answer


def score(response: str, task: Mapping[str, Any]) -> float:
    """Return reasoning_gym's score of what is in the last <answer> of a response, else of the whole response."""
    made = task["reasoning_gym"]
    data = _data(made["generator"], made["seed"], made["size"], json.dumps(made["options"]))
    answer = extract_answer(response)
    entry = data[made["index"]]
    return float(data.score_answer(response.strip() if answer is None else answer, entry))


@lru_cache(maxsize=32)
def _data(generator: str, seed: int, size: int, options: str) -> Any:
    return reasoning_gym.create_dataset(generator, seed=seed, size=size, **json.loads(options))
