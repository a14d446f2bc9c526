"""What a response says: its text is parted into reasoning, content and calls of tools, and written as OpenAI does."""

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer_hooks.parts.agents.messages import Message, parsed_arguments
from explorer_hooks.parts.agents.tool_formats import ToolFormat, Tools, read_calls

FinishReason = Literal["stop", "length", "tool_calls"]

_THINK, _THOUGHT = "<think>", "</think>"
_LETTERS = string.ascii_letters + string.digits
_ID = 9  # letters of a call's id: templates of Mistral take no other number


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    content: str  # its text
    reasoning: str = ""  # what the model wrote before it in its own thoughts
    # The tools that it calls: name and arguments as JSON text, by the id of the call.
    calls: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    finish: FinishReason = "stop"  # why it ended

    @property
    def message(self) -> Message:
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
    def __init__(self, tool_format: ToolFormat, template: str) -> None:
        self.tool_format, self._thinks = tool_format, _THOUGHT in template

    def parse(self, text: str, *, tools: Tools, is_whole: bool) -> ModelAnswer:
        """Return what a response says: no calls without `tools` that the model was told of, or if it was cut.

        `text` has its special tokens, but not the one that ended it.
        """
        reasoning, content = self._parted(text)
        said, called = read_calls(self.tool_format, content, tools) if tools and is_whole else (content, [])
        if called:
            calls = {"".join(secrets.choice(_LETTERS) for _ in range(_ID)): call for call in called}
            return ModelAnswer(said.strip(), reasoning, calls, "tool_calls")
        return ModelAnswer(content.strip(), reasoning, finish="stop" if is_whole else "length")

    def _parted(self, text: str) -> tuple[str, str]:
        if not self._thinks or _THOUGHT not in text:
            return "", text
        thoughts, _, content = text.partition(_THOUGHT)
        return thoughts.replace(_THINK, "", 1).strip(), content


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int

    @property
    def document(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that the model drew: its text alone, and the natural logarithm of its probability."""

    text: str
    logprob: float

    @property
    def document(self) -> dict[str, Any]:
        """Return it as answers have it; without bytes if the token is a part of a character."""
        is_part = "\ufffd" in self.text
        return {
            "token": self.text,
            "logprob": self.logprob,
            "bytes": None if is_part else list(self.text.encode()),
            "top_logprobs": [],
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer on its way to the agent."""

    id: str  # the turn
    model: str
    created: int  # seconds since the epoch
    answer: ModelAnswer  # what the response says
    usage: Usage  # tokens of prompt and answer
    # The tokens of the answer, all that the model drew; None if nobody asked for them.
    logprobs: Sequence[TokenLogprob] | None = None

    @property
    def document(self) -> dict[str, Any]:
        said, finish = self._said(), self.answer.finish
        choice = {"index": 0, "message": said, "logprobs": self._logprobs(), "finish_reason": finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage.document}

    def chunks(self, *, usage: bool) -> Iterator[str]:
        """Yield the lines of a stream: the answer in one piece, why it ended, and its tokens if they are wanted."""
        said = {key: value for key, value in self._said().items() if value is not None}
        if "tool_calls" in said:
            said["tool_calls"] = [{"index": at, **call} for at, call in enumerate(said["tool_calls"])]
        for delta, logprobs, finish in ((said, self._logprobs(), None), ({}, None, self.answer.finish)):
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            yield self._line([choice])
        if usage:
            yield self._line([], usage=self.usage.document)
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self._head('chat.completion.chunk'), 'choices': choices, **more})}\n\n"

    def _logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return {"content": [token.document for token in self.logprobs], "refusal": None}

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
