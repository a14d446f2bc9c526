"""Tokenizers: prompts become token ids, and token ids become text."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.tasks.task import Prompt
from syncd.errors import ConfigError, first_line
from syncd.extras import install_command

_FILE = "tokenizer.json"

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a chat template raises, besides errors of its own, for messages that it does not expect."""


class Tokens(ABC):
    """What explorers need of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, including those that the model expects around it.

        Raises:
            ValueError: The chat template refuses the messages.
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
            tools: The tools that the model is told of.
            arguments: Further variables of the template.
            answers: Whether the text goes on to where the model answers.
        """

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, also of special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def open_tokens(directory: str, *, trust_remote_code: bool = False) -> Tokens:
    """Return the tokenizer of a model directory: transformers', or tokenizers' if transformers is not installed."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and not everybody has it
    except ImportError:
        return PlainTokens(_plain(directory))
    try:
        return TransformersTokens(
            AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        )
    except Exception as error:  # tokenizers raises Exception itself
        raise _unreadable(directory, error) from error


class TransformersTokens(Tokens):
    @property
    def size(self) -> int:
        return len(self.tokenizer)

    def ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, prompt: Prompt) -> list[int]:
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
        return int(self.tokenizer.get_vocab_size())

    def ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            raise ConfigError("tasks of messages need transformers", hint=install_command("transformers"))
        return list(self.tokenizer.encode(prompt).ids)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        answers: bool,
    ) -> str:
        del messages, tools, arguments, answers
        raise ConfigError("messages need transformers", hint=install_command("transformers"))


def _plain(directory: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError("no tokenizer is installed", hint=install_command("explorer")) from error
    path = os.path.join(directory, _FILE)
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # as above
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the tokenizer cannot be read: {first_line(error)}",
        path=path,
        hint="model.path names a directory with tokenizer.json",
    )


def hide_progress_bars() -> None:
    """Disable transformers' progress bars, which would be drawn over the log."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging  # noqa: PLC0415 - as above

        logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers types little
