"""The exact tokens of a prompt: those of an earlier turn as recorded, and what the template writes after it.

A history that an agent sends back is text. Its tokens are not those that the model chose: text can be cut into tokens
in several ways, reasoning is missing, arguments are spaced anew. So the recorded tokens are used, and of the template
only what it writes behind the end of the recorded answer.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from explorer_hooks.parts.agents.chat import ChatRequest
from explorer_hooks.parts.agents.messages import Message
from syncd.protocol.documents import parse_json

_MARK = f"mark{secrets.token_hex(8)}"
"""Stands for what an answer says, to find where a template writes it; no chat has this text."""

_CONFIGURATIONS = ("generation_config.json", "config.json")


class PromptTooLongError(ValueError):
    """A text has more characters than as many tokens as are allowed can have."""


class ChatTemplate(Protocol):
    """A tokenizer with a chat template."""

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        answers: bool,
    ) -> str:
        """Return the text of messages; with `answers` up to where the model answers."""

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text alone."""


class Splicer:
    """Makes prompts for one model.

    `ends` are the texts of the tokens that end an answer, by their ids. A text of more than `most` characters is
    refused: it would take seconds to cut, while others wait.
    """

    def __init__(self, template: ChatTemplate, ends: Mapping[int, str], most: float = math.inf) -> None:
        self._template, self.ends, self._most = template, ends, most

    def prompt(self, request: ChatRequest) -> list[int]:
        return self._ids_of(self._text(request, request.messages, answers=True))

    def continuation(self, request: ChatRequest, at: int, last: int) -> list[int] | None:
        """Return the tokens that the template writes after an answer, None if that cannot be told.

        The template is rendered twice with a mark in the answer's place: up to the answer, and whole. Both texts must
        have the mark equally often and be the same from its last place to the end of the turn, or, if the template
        leaves the end to the next message, to the end of the first text. What follows there in the whole text is the
        continuation. `at` is the answer's index in the messages, `last` its last token as it was recorded.
        """
        marked = [*request.messages[:at], _marked(request.messages[at])]
        before = self._text(request, marked, answers=False)
        whole = self._text(request, [*marked, *request.messages[at + 1 :]], answers=True)
        if not 0 < before.count(_MARK) == whole.count(_MARK):
            return None
        behind, tail = before.rpartition(_MARK)[2], whole.rpartition(_MARK)[2]
        places = [(start, token) for token, text in self.ends.items() if (start := tail.find(text)) >= 0]
        if not places:
            return None
        start, token = min(places)
        end = start + len(self.ends[token])
        if behind != tail[:start] and behind[:end] != tail[:end]:
            return None
        # Cut behind a special token, text has the same tokens as in its place.
        ids = self._ids_of(tail[start:])
        if not ids or ids[0] != token:
            return None
        return ids[1:] if last == token else ids

    def _ids_of(self, text: str) -> list[int]:
        if len(text) > self._most:
            raise PromptTooLongError(f"the prompt has {len(text)} characters; the limit is {self._most}")
        return self._template.ids_of(text)

    def _text(self, request: ChatRequest, messages: Sequence[Message], *, answers: bool) -> str:
        tools, arguments = request.tools, request.template_arguments
        try:
            return self._template.chat_text(messages, tools, arguments, answers=answers)
        except ValueError:
            if not any(message.get("tool_calls") for message in messages):
                raise
        # Most templates take the arguments of a call as an object, some as text.
        return self._template.chat_text(
            [_with_text(message) for message in messages], tools, arguments, answers=answers
        )


def _marked(answer: Message) -> Message:
    marked = _with_arguments(answer, lambda _: {_MARK: _MARK})
    marked.pop("reasoning_content", None)
    return {**marked, "content": _MARK}


def _with_text(message: Message) -> Message:
    return _with_arguments(
        message, lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments)
    )


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    made = dict(message)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
            for call in calls
        ]
    return made


def end_tokens(directory: str, tokenizer: Any) -> dict[int, str]:
    """Return the text of each token that ends an answer, by its id.

    The tokenizer names one; the configurations in the model's directory name such tokens as engines read them.
    """
    values: list[Any] = [getattr(tokenizer, "eos_token_id", None)]
    for name in _CONFIGURATIONS:
        value = _configuration(os.path.join(directory, name)).get("eos_token_id")
        values += value if isinstance(value, list) else [value]
    ids = {token for token in values if type(token) is int}
    return {token: str(tokenizer.decode([token], skip_special_tokens=False)) for token in sorted(ids)}


def _configuration(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            document = parse_json(file.read())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
