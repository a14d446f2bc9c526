"""OpenAI's Responses: a request for a turn is read from it, and the answer is written as it does.

Each request has the whole history; the gateway keeps no conversations.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer_hooks.parts.agents.answers import Completion
from explorer_hooks.parts.agents.api_errors import refused
from explorer_hooks.parts.agents.chat import (
    ChatRequest,
    json_object,
    least_tokens,
    listed,
    made_request,
    read_tools,
    well_formed,
)
from explorer_hooks.parts.agents.messages import Message, read_message, read_text
from explorer_hooks.parts.agents.request_fields import RESPONSES, check_fields

Item = Mapping[str, Any]
"""A part of a history or of an answer: a message, a call of a tool, its result, or reasoning."""

_ECHOED = ("instructions", "metadata")
_UNKNOWN = ("temperature", "top_p")  # settings of the job, whatever the request says


def read_responses_request(body: object, *, tolerates: bool = True) -> ChatRequest:
    """Return the request of a body; `tolerates` says whether harmless fields are taken, without effect."""
    with well_formed():
        asked = json_object(body)
        tolerated = check_fields(asked, RESPONSES, tolerates=tolerates)
        tools, strict = read_tools(asked, tolerates=tolerates)
        most = least_tokens(asked, "max_output_tokens")
        return made_request(asked, _messages(asked), tools, [*tolerated, *strict], most)


def _messages(body: Mapping[str, Any]) -> list[Message]:
    instructions = body.get("instructions")
    asked = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(body.get("input"), str):
        items = [{"role": "user", "content": body["input"]}]
    else:
        items = listed(body, "input")
    messages = [read_message(message, "instructions") for message in asked]
    reasoning: dict[str, str] = {}
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            reasoning = _reasoning(item, where)
        elif kind == "function_call":
            _add_call(messages, item, where, reasoning)
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(read_message({"role": "tool", **result}, where))
        elif kind == "message":
            messages.append(read_message({**item, **reasoning, "tool_calls": None}, where))
        else:
            raise refused(f"{where} is no message, call of a function, its output or reasoning", "input")
        reasoning = reasoning if kind == "reasoning" else {}
    return messages


def _add_call(messages: list[Message], item: Item, where: str, reasoning: Mapping[str, str]) -> None:
    """Add a call to the answer that it belongs to: the one before it, else one without text."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    answer = read_message({"role": "assistant", "tool_calls": [call], **reasoning}, where)
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        calls = [*last.get("tool_calls", ()), *answer["tool_calls"]]
        answer = {**last, "tool_calls": calls}
    messages.append(answer)


def _reasoning(item: Item, where: str) -> dict[str, str]:
    content = item.get("content") or []
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [{"type": "text", "text": part.get("text")} for part in parts]
    return {"reasoning_content": read_text(texts, where)}


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    completion: Completion  # the answer
    body: Mapping[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        cut = self.completion.answer.finish == "length"
        usage = self.completion.usage
        return self._head("incomplete" if cut else "completed", self._items()) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage.prompt,
                "output_tokens": usage.completion,
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def events(self) -> Iterator[str]:
        """Yield the lines of a stream: each item in one piece."""
        for number, (kind, more) in enumerate(self._events()):
            data = {"type": kind, "sequence_number": number, **more}
            yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = {"response": self._head("in_progress", [])}
        yield "response.created", begun
        yield "response.in_progress", begun
        for at, item in enumerate(self._items()):
            opened = {**item, "status": "in_progress", **_EMPTY[item["type"]]}
            yield "response.output_item.added", {"output_index": at, "item": opened}
            yield from _said(item, {"output_index": at, "item_id": item["id"]})
            yield "response.output_item.done", {"output_index": at, "item": item}
        whole = self.document
        yield f"response.{whole['status']}", {"response": whole}

    def _head(self, status: str, output: Sequence[Item]) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "object": "response",
            "created_at": self.completion.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.completion.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "tool_choice": self.body.get("tool_choice") or "auto",
            "tools": self.body.get("tools") or [],
            "usage": None,
            **dict.fromkeys(_UNKNOWN),
            **{name: self.body.get(name) for name in _ECHOED},
        }

    def _items(self) -> list[dict[str, Any]]:
        answer, name = self.completion.answer, self.completion.id
        status = "incomplete" if answer.finish == "length" else "completed"
        items: list[dict[str, Any]] = []
        if answer.reasoning:
            thought = {"type": "reasoning_text", "text": answer.reasoning}
            items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought]})
        if answer.content or not answer.calls:
            text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
            items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text]})
        for call, (function, arguments) in answer.calls.items():
            said = {"call_id": call, "name": function, "arguments": arguments}
            items.append({"type": "function_call", "id": f"fc_{call}", **said})
        return [{**item, "status": status} for item in items]


_EMPTY: Mapping[str, Item] = {
    "reasoning": {"content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
"""What an item has when it is announced."""


def _said(item: Item, position: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between the announcement of an item and its end."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {**position, "delta": arguments}
        yield (
            "response.function_call_arguments.done",
            {**position, "name": item["name"], "arguments": arguments},
        )
    elif item["type"] == "message":
        part = item["content"][0]
        position = {**position, "content_index": 0}
        yield "response.content_part.added", {**position, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**position, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**position, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**position, "part": part}
