"""What a response says: its text is parted into reasoning, content and calls of tools, and written as OpenAI does."""

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer_hooks.gateway.chat import Message, parsed_arguments

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "none"]
"""How a model writes calls of tools. auto: as the chat template shows."""

FinishReason = Literal["stop", "length", "tool_calls"]

_THINK, _THOUGHT = "<think>", "</think>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_LETTERS = string.ascii_letters + string.digits
_ID = 9
"""Letters of a call's id: templates of Mistral take no other number."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a response says.

    Args:
        content: Its text.
        reasoning: What the model wrote before it in its own thoughts.
        calls: The tools that it calls: name and arguments as JSON text, by the id of the call.
        finish: Why it ended.
    """

    content: str
    reasoning: str = ""
    calls: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    finish: FinishReason = "stop"

    @property
    def message(self) -> Message:
        """Return the message that an agent sends back, as chat templates take it."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        calls = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call[0], "arguments": parsed_arguments(call[1])},
            }
            for name, call in self.calls.items()
        ]
        return made | ({"tool_calls": calls} if calls else {})


class AnswerParser:
    """Parts the texts of one model's responses.

    Args:
        tool_format: How the model writes calls of tools.
        template: The text of its chat template.
    """

    def __init__(self, tool_format: ToolFormat, template: str) -> None:
        self.tool_format = _shown_format(template) if tool_format == "auto" else tool_format
        self._thinks = _THOUGHT in template

    def parse(self, text: str, *, has_tools: bool, is_whole: bool) -> ModelAnswer:
        """Return what a response says.

        Args:
            text: The response, with special tokens but without the one that ended it.
            has_tools: Whether the model was told of tools.
            is_whole: Whether it ended by itself; a cut answer calls nothing.
        """
        reasoning, content = self._parted(text)
        found = list(_calls(self.tool_format, content)) if has_tools and is_whole else []
        if found and all(name for name, _ in found):
            calls = {"".join(secrets.choice(_LETTERS) for _ in range(_ID)): call for call in found}
            return ModelAnswer(_before_calls(self.tool_format, content), reasoning, calls, "tool_calls")
        return ModelAnswer(content.strip(), reasoning, finish="stop" if is_whole else "length")

    def _parted(self, text: str) -> tuple[str, str]:
        if not self._thinks or _THOUGHT not in text:
            return "", text
        thoughts, _, content = text.partition(_THOUGHT)
        return thoughts.replace(_THINK, "", 1).strip(), content


def _shown_format(template: str) -> ToolFormat:
    if "<tool_call>" in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if '"parameters": ' in template and "<|eot_id|>" in template else "none"


def _calls(tool_format: ToolFormat, text: str) -> Iterator[tuple[str, str]]:
    """Yield name and arguments of each call in a text; an empty name for a call that cannot be read."""
    if tool_format == "hermes":
        yield from (_call(_json(inner), "arguments") for inner in _HERMES.findall(text))
    elif tool_format == "mistral" and _MISTRAL in text:
        listed = _json(text.partition(_MISTRAL)[2])
        yield from (_call(one, "arguments") for one in (listed if isinstance(listed, list) else [None]))
    elif tool_format == "llama3" and text.strip().removeprefix(_PYTHON).lstrip().startswith("{"):
        yield _call(_json(text.strip().removeprefix(_PYTHON)), "parameters")


def _call(found: object, key: str) -> tuple[str, str]:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return "", ""
    arguments = found.get(key, {})
    return found["name"], arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _before_calls(tool_format: ToolFormat, text: str) -> str:
    marks = {"hermes": "<tool_call>", "mistral": _MISTRAL}
    return text.partition(marks[tool_format])[0].strip() if tool_format in marks else ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a turn: of its prompt and of its answer."""

    prompt: int
    completion: int

    @property
    def document(self) -> dict[str, int]:
        """Return it as answers have it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer on its way to the agent.

    Args:
        id: The turn.
        model: What the model is called.
        created: Seconds since the epoch.
        answer: What the response says.
        usage: Tokens of prompt and answer.
    """

    id: str
    model: str
    created: int
    answer: ModelAnswer
    usage: Usage

    @property
    def document(self) -> dict[str, Any]:
        """Return the answer to a request that is no stream."""
        choice = {"index": 0, "message": self._said(), "logprobs": None, "finish_reason": self.answer.finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage.document}

    def chunks(self, *, usage: bool) -> Iterator[str]:
        """Yield the lines of a stream: the answer in one piece, why it ended, and its tokens if they are wanted."""
        said = {key: value for key, value in self._said().items() if value is not None}
        if "tool_calls" in said:
            said["tool_calls"] = [{"index": at, **call} for at, call in enumerate(said["tool_calls"])]
        for delta, finish in ((said, None), ({}, self.answer.finish)):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield self._line([choice])
        if usage:
            yield self._line([], usage=self.usage.document)
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self._head('chat.completion.chunk'), 'choices': choices, **more})}\n\n"

    def _said(self) -> dict[str, Any]:
        answer = self.answer
        calls = [
            {"id": name, "type": "function", "function": {"name": call[0], "arguments": call[1]}}
            for name, call in answer.calls.items()
        ]
        made: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if calls else "")}
        if answer.reasoning:
            made["reasoning_content"] = answer.reasoning
        return made | ({"tool_calls": calls} if calls else {})
