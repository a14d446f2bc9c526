"""A request for a turn, read from the body of OpenAI's chat completions: every field is used, replaced or refused.

Sampling settings are replaced, because the trainer needs log-probs of the distribution that it trains. What would
change that distribution in another way, or would need several answers, is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer_hooks.gateway.api_errors import refused
from syncd.protocol.digest import hasher

Message = Mapping[str, Any]
"""A message as chat templates take it: role, content as text, and what else its role has."""

REPLACED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""Sampling settings: taken, and replaced by those of the job."""

_USED = frozenset(
    {
        *("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"),
        *("stream", "stream_options", "chat_template_kwargs"),
    }
)
_IGNORED = frozenset({"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Fields that say nothing about the answer."""

_ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "parallel_tool_calls": (True, None),
    "logit_bias": ({}, None),
    "stop": ([], None),
    "response_format": ({"type": "text"}, None),
}
"""Fields that are taken with these values alone."""

_RESERVED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
    *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
)
"""Names that are no variables of templates, or that the gateway sets."""

_ROLES = ("assistant", "developer", "system", "tool", "user")
_ABOUT = {
    "n": "a session has one answer a turn; open a session for each rollout",
    "logprobs": "log-probs are recorded, and agents do not get them",
    "parallel_tool_calls": "the model decides how many tools it calls",
    "logit_bias": "it changes the distribution that is trained",
    "stop": "the model decides where it stops",
    "response_format": "constrained decoding changes the distribution that is trained",
    "tool_choice": "constrained decoding changes the distribution that is trained",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a turn.

    Args:
        messages: The history, as chat templates take it.
        tools: The tools that the model may call.
        template_arguments: Further variables of the chat template.
        max_tokens: Tokens of the answer at most; None for the job's limit.
        stream: Whether the answer is sent as a stream.
        usage: Whether the stream ends with the number of tokens.
        keys: For each message the key of the history up to and with it.
        replaced: Names of the sampling settings that the request has and that are replaced.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    template_arguments: Mapping[str, Any]
    max_tokens: int | None
    stream: bool
    usage: bool
    keys: tuple[str, ...]
    replaced: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return what two requests for the same turn have in common."""
        return _digest(self.keys[-1], self.max_tokens)


def read_request(body: object) -> ChatRequest:
    """Return the request of a body.

    Raises:
        ApiError: It is none, or has a field that cannot be served.
    """
    if not isinstance(body, dict):
        raise refused("the body is not a JSON object", code="invalid_body")
    try:
        return _request(body)
    except RecursionError:
        raise refused("the body is nested too deeply", code="invalid_body") from None
    except UnicodeEncodeError:
        raise refused("a text of the body has half a character", code="invalid_body") from None


def _request(body: Mapping[str, Any]) -> ChatRequest:
    _check_fields(body)
    messages = tuple(_message(one, at) for at, one in enumerate(_listed(body, "messages")))
    if not messages or messages[-1]["role"] == "assistant":
        raise refused("messages must end with one that the model answers", "messages")
    tools = _tools(body)
    arguments = _template_arguments(body)
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages,
        tools,
        arguments,
        _max_tokens(body),
        bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        history_keys(messages, tools, arguments),
        tuple(sorted(REPLACED & {name for name, value in body.items() if value is not None})),
    )


def history_keys(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return for each message a key of the history up to and with it; histories are the same if their keys are."""
    keys, key = [], _digest(tools, arguments)
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
        return _digest(key, message)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return _digest(key, "assistant", message["content"].strip(), calls)


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    digest = hasher()
    digest.update(text.encode())
    return digest.hexdigest()


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise refused(f"{name} = {_shown(value)} is not supported: {_ABOUT.get(name, '')}", name)
        elif name not in _USED | _IGNORED | REPLACED and value is not None:
            raise refused(f"{name[:80]} is not supported", name[:80])


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name)
    if not isinstance(found, list):
        raise refused(f"{name} is not a list", name)
    return found


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if any(type(one) is not int or one < 1 for one in given):
        raise refused("max_tokens is not a whole number above 0", "max_tokens")
    return min(given, default=None)


def _template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    found = body.get("chat_template_kwargs") or {}
    if not isinstance(found, dict):
        raise refused("chat_template_kwargs is not an object", "chat_template_kwargs")
    if taken := [name for name in _RESERVED if name in found]:
        raise refused(f"chat_template_kwargs may not have {taken[0]}", "chat_template_kwargs")
    return found


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refused(
            f"tool_choice = {_shown(choice)} is not supported: {_ABOUT['tool_choice']}", "tool_choice"
        )
    if choice == "none" or body.get("tools") is None:
        return ()
    tools = _listed(body, "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused("a tool is not a function with a name", "tools")
        if function.get("strict"):
            raise refused(f"strict tools are not supported: {_ABOUT['tool_choice']}", "tools")
    return tuple(tools)


def _message(found: object, at: int) -> Message:
    where = f"messages[{at}]"
    if not isinstance(found, dict) or found.get("role") not in _ROLES:
        raise refused(f"{where} is not a message with one of the roles {', '.join(_ROLES)}", "messages")
    role = found["role"]
    made: dict[str, Any] = {"role": role, "content": _text(found.get("content"), where)}
    if role == "assistant":
        return made | _calls(found, where) | _reasoning(found)
    kept = ("tool_call_id", "name") if role == "tool" else ("name",)
    return made | {name: str(found[name]) for name in kept if found.get(name) is not None}


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in ("text", "input_text")]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise refused(f"the content of {where} is not text: images and files are not supported", "messages")


def _calls(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    calls = found.get("tool_calls") or []
    if not isinstance(calls, list):
        raise refused(f"tool_calls of {where} is not a list", "messages")
    return {"tool_calls": [_call(call, where) for call in calls]} if calls else {}


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise refused(f"a tool call of {where} is not one of a function with a name", "messages")
    arguments = parsed_arguments(function.get("arguments"))
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def parsed_arguments(found: object) -> Any:
    """Return the arguments of a call as templates take them: what their JSON says if it is an object, else as is."""
    try:
        parsed = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return found
    return parsed if isinstance(parsed, dict) else found


def _reasoning(found: Mapping[str, Any]) -> dict[str, Any]:
    text = found.get("reasoning_content") or found.get("reasoning")
    return {"reasoning_content": text} if isinstance(text, str) else {}


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:80]
