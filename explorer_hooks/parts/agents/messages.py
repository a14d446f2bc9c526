"""Messages of a history, in the form that chat templates take, and what two equal histories have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.parts.agents.api_errors import refused
from syncd.protocol.digest import hasher

Message = Mapping[str, Any]
"""A message as chat templates take it: role, content as text, and what else its role has."""

_TEXTS = ("text", "input_text", "output_text")
_ROLES = ("assistant", "developer", "system", "tool", "user")


def read_message(message: object, where: str) -> Message:
    """Return a message of a request as chat templates take it; errors call it `where`."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise refused(f"{where} is not a message with one of the roles {', '.join(_ROLES)}", _field(where))
    role = message["role"]
    made: dict[str, Any] = {"role": role, "content": read_text(message.get("content"), where)}
    if role == "assistant":
        return made | _calls(message, where) | _reasoning(message)
    kept = ("tool_call_id", "name") if role == "tool" else ("name",)
    return made | {name: str(message[name]) for name in kept if message.get(name) is not None}


def _field(where: str) -> str:
    return where.partition("[")[0]


def read_text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in _TEXTS]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise refused(f"the content of {where} is not text: images and files are not supported", _field(where))


def _calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise refused(f"tool_calls of {where} is not a list", _field(where))
    return {"tool_calls": [_call(call, where) for call in calls]} if calls else {}


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise refused(f"a tool call of {where} is not one of a function with a name", _field(where))
    arguments = parsed_arguments(function.get("arguments"))
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def parsed_arguments(arguments: object) -> Any:
    """Return the arguments of a call as templates take them: what their JSON says if it is an object, else as is."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    text = message.get("reasoning_content") or message.get("reasoning")
    return {"reasoning_content": text} if isinstance(text, str) else {}


def history_keys(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return for each message a key of the history up to and with it; histories are the same if their keys are."""
    keys, key = [], digest(tools, arguments)
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    return tuple(keys)


def next_key(key: str, message: Message) -> str:
    """Return the key of a history with one message more.

    Of an answer of the model counts what agents send back: text and calls of tools, whatever their ids and the spaces
    in their arguments are. Its reasoning does not count.
    """
    if message["role"] != "assistant":
        return digest(key, message)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return digest(key, "assistant", message["content"].strip(), calls)


def digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    made = hasher()
    made.update(text.encode())
    return made.hexdigest()
