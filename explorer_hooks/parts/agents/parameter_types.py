"""Values of tools' arguments that models write without quotes: the tool's JSON schema says which of them are text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
_PYTHON: Mapping[str, object] = {"True": True, "False": False, "None": None}
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
    """Return the JSON types that a schema allows; all of them if it does not say."""
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

    Args:
        types: The JSON types that the parameter may have; None if the tool does not declare it.
    """
    allowed = _ANY if types is None else types
    if allowed == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_allowed = bool(_JSON_TYPES[type(value)] & allowed) and not isinstance(value, str)
    # A text in quotes is what a model wrote for text: the tool gets it as it stands, if it may be text at all.
    return value if is_allowed or "string" not in allowed else text
