"""Tasks: what the model is asked, read from JSONL and checked as a whole; their order follows from a seed."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncd.errors import ConfigError, StorageError
from syncd.experience.model import MAX_NAME
from syncd.protocol.digest import hasher

MAX_LINE = 1 << 22
"""Bytes of one task at most."""

_SHOWN = 40
_MESSAGES = "messages"

Prompt = str | Sequence[Mapping[str, str]]
"""Text that goes to the model as it stands, or messages that the tokenizer's chat template makes text of."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        id: Its name: what the file calls it, or its line.
        prompt: What the model is asked.
        answer: What the file has as the answer, None where it has none.
        info: Everything else that the file says of it.
    """

    id: str
    prompt: Prompt
    answer: Any
    info: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the prompt as people read it: of messages the contents."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a file.

    Args:
        path: The file.
        digest: Of its bytes.
        all: Its tasks, at least one.
    """

    path: str
    digest: str
    all: tuple[Task, ...]


def read_tasks(path: str, prompt_key: str = "prompt", answer_key: str = "answer", limit: int = 0) -> Tasks:
    """Return the tasks of a JSONL file; empty lines are passed over.

    Args:
        path: The file.
        prompt_key: What it calls the prompt.
        answer_key: What it calls the answer.
        limit: Tasks that are read at most; 0 for all.

    Raises:
        ConfigError: The file is not there, has no task, or a line is not one; the line is named.
        StorageError: It cannot be read.
    """
    made, digest = [], hasher()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                digest.update(line)
                if line.strip():
                    made.append(_task(line, f"{path}:{number}", number, (prompt_key, answer_key)))
                if len(made) == limit > 0:
                    break
    except FileNotFoundError:
        raise ConfigError("there are no tasks", path=path, hint="explorer.tasks names a JSONL file") from None
    except OSError as error:
        raise StorageError(error.strerror or str(error), path=path) from error
    if not made:
        raise ConfigError("the file has no task", path=path)
    return Tasks(path, f"{digest.hexdigest()}", tuple(made))


def order(count: int, seed: str, epoch: int) -> Sequence[int]:
    """Return the order of an epoch: the same for the same seed, in every process and at every start."""
    places = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(places)  # noqa: S311 - an order, no secret
    return places


def _task(line: bytes, where: str, number: int, keys: tuple[str, str]) -> Task:
    if len(line) > MAX_LINE:
        raise ConfigError(f"a task of more than {MAX_LINE} bytes", path=where)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", path=where) from None
    if not isinstance(row, dict):
        raise ConfigError("a task is a JSON object", path=where)
    prompt_key, answer_key = keys
    prompt = row.pop(prompt_key, None) or row.pop(_MESSAGES, None)
    name = row.pop("id", None)
    _check_prompt(prompt, where, prompt_key)
    named = str(name) if isinstance(name, str | int) and name != "" else f"line-{number}"
    if len(named) > MAX_NAME or not named.isprintable():
        raise ConfigError(f"id is not a text of 1 to {MAX_NAME} characters", path=where)
    return Task(named, prompt, row.pop(answer_key, None), row)


def _check_prompt(prompt: Any, where: str, key: str) -> None:
    if isinstance(prompt, str) and prompt:
        return
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return
    shown = json.dumps(prompt)[:_SHOWN]
    hint = f'"{key}": "text", or "{_MESSAGES}": [{{"role": "user", "content": "text"}}]'
    raise ConfigError(f"{key} = {shown} is neither text nor messages", path=where, hint=hint)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def epochs(tasks: Tasks, seed: str | None, epoch: int, position: int) -> Iterator[tuple[int, int, Task]]:
    """Yield tasks without end from a place on: epoch, position in its order, and the task.

    Args:
        tasks: The tasks.
        seed: Of the orders; None for the order of the file.
        epoch: The epoch to begin in.
        position: The position to begin at.
    """
    while True:
        places = order(len(tasks.all), seed, epoch) if seed is not None else range(len(tasks.all))
        for at in range(position, len(places)):
            yield epoch, at, tasks.all[places[at]]
        epoch, position = epoch + 1, 0
