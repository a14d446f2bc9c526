"""How models write calls of tools: a reader for each format, and which of them a chat template writes.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    glm45         <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}] or [TOOL_CALLS]NAME[ARGS]{...}
    llama3        {"name": ..., "parameters": {...}} as the whole answer

The names are those that vLLM and SGLang give their parsers. A reader yields name and arguments of each call; an empty
name stands for a call that cannot be read.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from explorer_hooks.parts.agents.messages import parsed_arguments
from explorer_hooks.parts.agents.splice import ChatTemplate

ToolFormat = Literal["hermes", "qwen3_coder", "glm45", "mistral", "llama3", "none", "untold"]
"""How a model writes calls of tools. none: its answers are text alone; untold: its template tells it of no tools."""

Tools = Sequence[Mapping[str, Any]]
Calls = Iterator[tuple[str, str]]

_UNREADABLE = ("", "")
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.:/-]+)\s*(.*)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_MISTRAL_CALL = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](.*)", re.DOTALL)


def _hermes(text: str, _tools: Tools) -> Calls:
    return (_json_call(_json(block), "arguments") for block in _BLOCK.findall(text))


def _qwen3_coder(text: str, tools: Tools) -> Calls:
    for block in _BLOCK.findall(text):
        call = _FUNCTION.fullmatch(block)
        yield _tagged_call(call[1].strip(), call[2], _PARAMETER, tools) if call else _UNREADABLE


def _glm45(text: str, tools: Tools) -> Calls:
    for block in _BLOCK.findall(text):
        call = _GLM_NAME.fullmatch(block)
        yield _tagged_call(call[1], call[2], _GLM_ARGUMENT, tools) if call else _UNREADABLE


def _mistral(text: str, _tools: Tools) -> Calls:
    listed = _json(text.partition(_MISTRAL)[2])
    if isinstance(listed, list):
        return (_json_call(call, "arguments") for call in listed)
    return map(_mistral_call, text.split(_MISTRAL)[1:])


def _mistral_call(text: str) -> tuple[str, str]:
    call = _MISTRAL_CALL.fullmatch(text.strip())
    arguments = _json(call[2]) if call else None
    if call is None or arguments is None:
        return _UNREADABLE
    return _json_call({"name": call[1], "arguments": arguments}, "arguments")


def _llama3(text: str, _tools: Tools) -> Calls:
    whole = text.strip().removeprefix(_PYTHON).lstrip()
    return iter([_json_call(_json(whole), "parameters")] if whole.startswith("{") else [])


@dataclass(frozen=True, slots=True)
class _CallFormat:
    mark: str  # what begins the calls; empty if a call is the whole answer
    read: Callable[[str, Tools], Calls]  # yields the calls of a text


_FORMATS: Mapping[ToolFormat, _CallFormat] = {
    "hermes": _CallFormat("<tool_call>", _hermes),
    "qwen3_coder": _CallFormat("<tool_call>", _qwen3_coder),
    "glm45": _CallFormat("<tool_call>", _glm45),
    "mistral": _CallFormat(_MISTRAL, _mistral),
    "llama3": _CallFormat("", _llama3),
}


def read_calls(name: ToolFormat, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """Return what a text says before its calls, and name and JSON arguments of each; no calls if one is unreadable.

    `tools`, what it was told of in OpenAI's form, say which arguments are text.
    """
    used = _FORMATS.get(name)
    if used is None or used.mark not in text:
        return text, []
    calls = list(used.read(text, tools))
    if not calls or not all(
        called and _has_whole_characters(called, arguments) for called, arguments in calls
    ):
        return text, []
    return text.partition(used.mark)[0] if used.mark else "", calls


def _has_whole_characters(name: str, arguments: str) -> bool:
    """Return whether no escape in a call stands for half a character, which no answer or history can have."""
    try:
        json.dumps([name, arguments, parsed_arguments(arguments)], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _tagged_call(name: str, text: str, argument: re.Pattern[str], tools: Tools) -> tuple[str, str]:
    types, arguments, position = parameter_types(tools, name), dict[str, object](), 0
    while match := argument.match(text, position):
        key = match[1].strip()
        arguments[key], position = typed_value(match[2], types.get(key)), match.end()
    if text[position:].strip():
        return _UNREADABLE
    return name, json.dumps(arguments, ensure_ascii=False)


def _json_call(call: object, key: str) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _UNREADABLE
    arguments = call.get(key, {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- which format a chat template writes ----------------------------------------------------------------------

_ARGUMENTS = {"count": 7, "text": "12"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["count", "text"],
        },
    },
}
_QUESTION = {"role": "user", "content": "Look it up."}


def written_format(template: ChatTemplate, ends: Iterable[str]) -> ToolFormat | None:
    """Return the format that reads the call which a chat template writes, None if none does.

    The template itself is asked: it writes a call, and the format that gives back its name and arguments, each of its
    type, is the model's. `ends` are the texts of the tokens that end an answer.
    """
    try:
        prompt = template.chat_text([_QUESTION], [_TOOL], {}, answers=True)
        if prompt == template.chat_text([_QUESTION], [], {}, answers=True):
            return "untold"
    except ValueError:
        return "untold"  # it refuses tools
    written = [
        _written(template, prompt, ends, arguments) for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS))
    ]
    return next((name for name in _FORMATS for text in written if _reads(name, text)), None)


def _written(template: ChatTemplate, prompt: str, ends: Iterable[str], arguments: object) -> str:
    """Return what a template writes for a call, behind the place where the model answers."""
    function = {"name": _TOOL["function"]["name"], "arguments": arguments}  # type: ignore[index] # a literal
    call = {"id": "lookup001", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        whole = template.chat_text([_QUESTION, answer], [_TOOL], {}, answers=False)
    except ValueError:
        return ""
    pairs = enumerate(zip(prompt, whole, strict=False))
    text = whole[next((at for at, (before, after) in pairs if before != after), len(prompt)) :]
    for end in ends:
        text = text.partition(end)[0]
    return text


def _reads(name: ToolFormat, text: str) -> bool:
    _, calls = read_calls(name, text.rpartition("</think>")[2], [_TOOL])
    return [(called, _json(arguments)) for called, arguments in calls] == [("look_up", _ARGUMENTS)]


# --- arguments that models write without quotes: the tool's JSON schema says which of them are text -----------------

_JSON_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
_ANY = frozenset[str]().union(*_JSON_TYPES.values())
_PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""What templates in Python write for these values, and models after them."""


def parameter_types(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, frozenset[str]]:
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            schemas = properties if isinstance(properties, dict) else {}
            return {key: _types(schema) for key, schema in schemas.items()}
    return {}


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, dict):
        return _ANY
    branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list):
        return frozenset[str]().union(*map(_types, branches))
    declared = schema.get("type")
    if isinstance(declared, list):
        return frozenset(map(str, declared))
    if isinstance(declared, str):
        return frozenset({declared})
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset[str]().union(*(_JSON_TYPES[type(value)] for value in values))
    return _ANY


def typed_value(text: str, types: frozenset[str] | None) -> object:
    """Return the value that a text stands for: what its JSON says if that has an allowed type, else the text.

    `types` are the JSON types that the parameter may have; None if the tool does not declare it.
    """
    allowed = _ANY if types is None else types
    if allowed == {"string"}:
        return text
    try:
        value = _PYTHON_WORDS[text.strip()] if text.strip() in _PYTHON_WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_allowed = bool(_JSON_TYPES[type(value)] & allowed) and not isinstance(value, str)
    # A text in quotes is what a model wrote for text: the tool gets it as it stands, if it may be text at all.
    return value if is_allowed or "string" not in allowed else text
