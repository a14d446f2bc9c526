"""Tasks: read from JSONL and checked, ordered by a seed, and turned into token ids by the model's tokenizer."""

import contextlib
import json
import os
import random
from abc import ABC, abstractmethod
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
"""Text for the model, or messages from which the tokenizer's chat template makes text."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        id: Its name: its id in the file, or its line.
        prompt: What the model is asked.
        answer: Its answer in the file, None if it has none.
        info: All other fields of its line.
    """

    id: str
    prompt: Prompt
    answer: Any
    info: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the prompt as text: for messages, their contents."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a file.

    Args:
        path: The file.
        digest: The digest of its bytes.
        all: Its tasks, at least one.
    """

    path: str
    digest: str
    all: tuple[Task, ...]


def read_tasks(path: str, prompt_key: str = "prompt", answer_key: str = "answer", limit: int = 0) -> Tasks:
    """Return the tasks of a JSONL file; empty lines are skipped.

    Args:
        path: The file.
        prompt_key: The prompt's key.
        answer_key: The answer's key.
        limit: Tasks that are read at most; 0 for all.

    Raises:
        ConfigError: The file is missing, has no task, or a line is not one; the error names the line.
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
        raise ConfigError(
            "the file of tasks is missing", path=path, hint="explorer.tasks names a JSONL file"
        ) from None
    except OSError as error:
        raise StorageError(error.strerror or str(error), path=path) from error
    if not made:
        raise ConfigError("the file has no task", path=path)
    return Tasks(path, f"{digest.hexdigest()}", tuple(made))


def order(count: int, seed: str, epoch: int) -> Sequence[int]:
    """Return the order of an epoch, which depends on nothing but the seed and the epoch."""
    places = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(places)  # noqa: S311 - not a secret
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
    """Yield tasks from a position on, without end: epoch, index in its order, and the task.

    Args:
        tasks: The tasks.
        seed: The seed of the orders; None for the order of the file.
        epoch: The first epoch.
        position: The first index in it.
    """
    while True:
        places = order(len(tasks.all), seed, epoch) if seed is not None else range(len(tasks.all))
        for at in range(position, len(places)):
            yield epoch, at, tasks.all[places[at]]
        epoch, position = epoch + 1, 0


_FILE = "tokenizer.json"

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a chat template raises, besides errors of its own, for messages that it does not expect."""


class Tokens(ABC):
    """What explorers need of a tokenizer.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, including those that the model expects around it.

        Raises:
            ConfigError: There are messages and no chat template.
        """

    @property
    @abstractmethod
    def size(self) -> int:
        """Return how many tokens there are, special ones included."""

    @abstractmethod
    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text alone, without those that the model expects around a prompt."""

    @abstractmethod
    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        answers: bool,
    ) -> str:
        """Return the text that the chat template makes of messages.

        Args:
            messages: The messages.
            tools: The tools that the model is told of.
            arguments: Further variables of the template.
            answers: Whether the text goes on to where the model answers.

        Raises:
            ConfigError: There is no chat template.
            ValueError: The template refuses the messages.
        """

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, also of special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def open_tokens(directory: str, *, trust_remote_code: bool = False) -> Tokens:
    """Return the tokenizer of a model directory: transformers', or tokenizers' if transformers is not installed.

    Raises:
        ConfigError: The directory has no tokenizer that can be read.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and not everybody has it
    except ImportError:
        return PlainTokens(_plain(directory))
    try:
        return TransformersTokens(
            AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from error


class TransformersTokens(Tokens):
    """transformers' tokenizer, with chat templates."""

    @property
    def size(self) -> int:
        """Return how many tokens there are."""
        return len(self.tokenizer)

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text alone."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        # The template has already added what belongs around a prompt.
        return self.ids_of(self.chat_text(prompt, (), {}, answers=True))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        answers: bool,
    ) -> str:
        """Return the text that the chat template makes of messages."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template for messages",
                path=self.tokenizer.name_or_path,
                hint='give "prompt" as text, or put chat_template.jinja into the model directory',
            )
        from jinja2 import TemplateError  # noqa: PLC0415 - transformers needs it for templates alone

        try:
            made = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=answers,
                tokenize=False,
                **arguments,
            )
        except (*_REFUSALS, TemplateError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return str(made)


class PlainTokens(Tokens):
    """The tokenizer of `tokenizer.json` alone: for text, not for messages."""

    @property
    def size(self) -> int:
        """Return how many tokens there are."""
        return int(self.tokenizer.get_vocab_size())

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text alone."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        if not isinstance(prompt, str):
            raise ConfigError("tasks of messages need transformers", hint="pip install 'syncd[transformers]'")
        return list(self.tokenizer.encode(prompt).ids)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        answers: bool,
    ) -> str:
        """Raise: templates are transformers' matter."""
        del messages, tools, arguments, answers
        raise ConfigError("messages need transformers", hint="pip install 'syncd[transformers]'")


def _plain(directory: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError("no tokenizer is installed", hint="pip install 'syncd[explorer]'") from error
    path = os.path.join(directory, _FILE)
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises Exception itself
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the tokenizer cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        path=path,
        hint="model.path names a directory with tokenizer.json",
    )


def hide_progress_bars() -> None:
    """Disable transformers' progress bars, which would be drawn over the log."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging  # noqa: PLC0415 - as above

        logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers types little
