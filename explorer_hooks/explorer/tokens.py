"""Text and token ids, by the tokenizer of the model directory."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

from explorer_hooks.explorer.tasks import Prompt
from syncd.errors import ConfigError

_FILE = "tokenizer.json"


class Tokens(Protocol):
    """A tokenizer, as explorers need one."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, those that the model expects around it included.

        Raises:
            ConfigError: There are messages and no chat template.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""


def tokens_of(directory: str, *, trust_remote_code: bool = False) -> Tokens:
    """Return the tokenizer of a model directory: transformers', or that of tokenizers where it is not installed.

    Raises:
        ConfigError: The directory has none that can be read.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and not everybody has it
    except ImportError:
        return Plain(_plain(directory))
    try:
        return Whole(AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code))
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from error


class Whole:
    """transformers' tokenizer: chat templates too.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template for tasks of messages",
                path=self.tokenizer.name_or_path,
                hint='give "prompt" as text, or put chat_template.jinja into the model directory',
            )
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in prompt], add_generation_prompt=True, tokenize=False
        )
        # The template has written what stands around a prompt already.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class Plain:
    """The tokenizer of `tokenizer.json` alone: text, no messages.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        if not isinstance(prompt, str):
            raise ConfigError("tasks of messages need transformers", hint="pip install 'syncd[transformers]'")
        return list(self._tokenizer.encode(prompt).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


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
        f"no tokenizer can be read there: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        path=path,
        hint="model.path names a directory with tokenizer.json",
    )


def quiet() -> None:
    """Keep transformers from drawing progress bars over the log."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging  # noqa: PLC0415 - as above

        logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers types little
