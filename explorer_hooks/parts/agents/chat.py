"""A request for a turn, read from the body of OpenAI's chat completions.

Sampling settings are replaced, because the trainer needs log-probs of the distribution that it trains. What would
change that distribution in another way, or would need several answers, is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from explorer_hooks.parts.agents.api_errors import refused
from explorer_hooks.parts.agents.messages import Message, digest, history_keys, read_message
from explorer_hooks.parts.agents.request_fields import (
    CHAT,
    REPLACED,
    check_fields,
    harmless_refused,
    unsupported,
)

_RESERVED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
    *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
)
"""Names that are no variables of templates, or that the gateway sets."""

_MOST_STOPS, _MOST_STOP = 16, 256  # strings that a request may stop at, and characters of one


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: tuple[Message, ...]  # the history, as chat templates take it
    tools: tuple[Mapping[str, Any], ...]  # the tools that the model may call
    template_arguments: Mapping[str, Any]  # further variables of the chat template
    max_tokens: int | None  # tokens of the answer at most; None for the job's limit
    stream: bool  # whether the answer is sent as a stream
    usage: bool  # whether the stream ends with the number of tokens
    keys: tuple[str, ...]  # for each message the key of the history up to and with it
    replaced: tuple[str, ...]  # names of the sampling settings that the request has and that are replaced
    tolerated: tuple[str, ...] = ()  # names of the harmless fields that it has and that have no effect
    stop: tuple[str, ...] = ()  # strings at which the answer ends, without them
    logprobs: bool = False  # whether the agent gets the log-prob of each token

    @property
    def key(self) -> str:
        """Return what two requests for the same turn have in common."""
        return digest(self.keys[-1], self.max_tokens, *self.stop)


def read_request(body: object, *, tolerates: bool = True) -> ChatRequest:
    """Return the request of a body; `tolerates` says whether harmless fields are taken, without effect."""
    with well_formed():
        return _request(json_object(body), tolerates=tolerates)


def json_object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise refused("the body is not a JSON object", code="invalid_body")
    return body


@contextmanager
def well_formed() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise refused("the body is nested too deeply", code="invalid_body") from None
    except UnicodeEncodeError:
        raise refused("a text of the body has half a character", code="invalid_body") from None


def _request(body: Mapping[str, Any], *, tolerates: bool) -> ChatRequest:
    tolerated = check_fields(body, CHAT, tolerates=tolerates)
    listed_messages = enumerate(listed(body, "messages"))
    messages = [read_message(message, f"messages[{at}]") for at, message in listed_messages]
    tools, strict = read_tools(body, tolerates=tolerates)
    options = body.get("stream_options") or {}
    most = least_tokens(body, "max_completion_tokens", "max_tokens")
    return replace(
        made_request(body, messages, tools, [*tolerated, *strict], most),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        stop=_stop(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
    )


def made_request(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    tolerated: Sequence[str],
    most: int | None,
) -> ChatRequest:
    """Return the request for an answer to messages, with what both APIs say in the same way."""
    if not messages or messages[-1]["role"] == "assistant":
        name = "input" if "input" in body else "messages"
        raise refused(f"{name} must end with a message that the model answers", name)
    arguments = _template_arguments(body)
    return ChatRequest(
        tuple(messages),
        tuple(tools),
        arguments,
        most,
        bool(body.get("stream")),
        usage=False,
        keys=history_keys(messages, tools, arguments),
        replaced=tuple(sorted(REPLACED & {name for name, value in body.items() if value is not None})),
        tolerated=tuple(tolerated),
    )


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise refused(f"{name} is not a list", name)
    return value


def least_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    limits = [body[name] for name in names if body.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise refused(f"{names[-1]} is not a whole number above 0", names[-1])
    return min(limits, default=None)


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or len(strings) > _MOST_STOPS:
        raise refused(f"stop is no text, and no list of {_MOST_STOPS} texts at most", "stop")
    if not all(isinstance(text, str) and 0 < len(text) <= _MOST_STOP for text in strings):
        raise refused(f"stop has an entry that is no text of 1 to {_MOST_STOP} characters", "stop")
    "".join(strings).encode()
    return tuple(sorted(set(strings)))


def _template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise refused("chat_template_kwargs is not an object", "chat_template_kwargs")
    if taken := [name for name in _RESERVED if name in arguments]:
        raise refused(f"chat_template_kwargs may not have {taken[0]}", "chat_template_kwargs")
    return arguments


def read_tools(body: Mapping[str, Any], *, tolerates: bool) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the tools of a request, and the names of the harmless fields that they have."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", choice)
    if choice == "none" or body.get("tools") is None:
        return [], []
    functions = [_function(tool) for tool in listed(body, "tools")]
    is_strict = any(function.get("strict") for function in functions)
    if is_strict and not tolerates:
        raise harmless_refused("tools", "strict")
    # Templates write what they get: the model is told of the tool, not of how arguments would be enforced.
    plain = [{key: value for key, value in function.items() if key != "strict"} for function in functions]
    return [{"type": "function", "function": function} for function in plain], ["tools.strict"] * is_strict


def _function(tool: object) -> Mapping[str, Any]:
    """Return the function that a tool is, in the form of either API."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        flat = {key: value for key, value in tool.items() if key != "type"}
        function = tool.get("function", flat)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return function
    raise refused("a tool is not a function with a name", "tools")
