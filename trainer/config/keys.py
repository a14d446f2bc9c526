"""All keys of the file by their dotted names, read off the model's JSON Schema, and which of them is nearest."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.config.model import JobConfig

Schema = Mapping[str, Any]

PATHS = ("job.dir", "job.state_dir", "model.path", "data.sft_path")
"""Keys that name a file or directory."""

_CLOSE = 0.6
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a table",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Args:
        name: Its dotted name.
        expected: What it takes, in words.
        default: As plain data; None where there is none.
        about: What it means.
        required: Whether it must be given.
        fixed: Whether a later start must agree with it.
        is_text: Whether it takes text and nothing else.
        is_free: Whether it is a table of keys that are checked elsewhere.
    """

    name: str
    expected: str
    default: Any
    about: str
    required: bool
    fixed: bool
    is_text: bool
    is_free: bool


@cache
def keys() -> Mapping[str, Key]:
    """Return all keys, in the order of the model."""
    return {key.name: key for _, part in _walk() for key in part}


@cache
def tables() -> Mapping[str, str]:
    """Return the dotted names of all tables of known keys with what they are about."""
    root = _schema()
    return {name: _about(_at(root, name)) for name, _ in _walk() if name}


def expected(key: str) -> str:
    """Return in words what a key or a table takes."""
    return keys()[key].expected if key in keys() else _KINDS["object"]


def owner(path: tuple[str | int, ...]) -> str:
    """Return the dotted name of the known key or table that a path leads to or into, empty if it leads to none."""
    name = ""
    for part in path:
        longer = f"{name}.{part}" if name else str(part)
        if longer not in keys() and longer not in tables():
            break
        name = longer
        if name in keys():
            break
    return name


def nearest(unknown: str) -> str | None:
    """Return the known key or table that was probably meant, wherever it is."""
    names = [*keys(), *tables()]
    last = unknown.rpartition(".")[2]
    if same := [name for name in names if _flat(name) in (_flat(unknown), _flat(last)) or _ends(name, last)]:
        return max(same, key=lambda name: difflib.SequenceMatcher(None, unknown, name).ratio())
    if near := difflib.get_close_matches(unknown, names, 1, _CLOSE):
        return near[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    return next((by_last[name] for name in difflib.get_close_matches(last, by_last, 1, _CLOSE)), None)


def _flat(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _ends(name: str, last: str) -> bool:
    return name.rpartition(".")[2] == last.replace("-", "_")


@cache
def _schema() -> Schema:
    return JobConfig.model_json_schema()


def _walk() -> Iterator[tuple[str, tuple[Key, ...]]]:
    """Yield each table's dotted name with its own keys; the whole file is the table without a name."""
    waiting = [""]
    while waiting:
        table = waiting.pop(0)
        place = _resolved(_at(_schema(), table))
        prefix = f"{table}." if table else ""
        below = {f"{prefix}{name}": part for name, part in place["properties"].items()}
        inner = [name for name, part in below.items() if "properties" in _resolved(part)]
        waiting[:0] = inner
        required = {f"{prefix}{name}" for name in place.get("required", ())}
        yield table, tuple(_key(name, below[name], name in required) for name in below if name not in inner)


def _at(root: Schema, name: str) -> Schema:
    place = root
    for part in name.split(".") if name else ():
        place = _resolved(place)["properties"][part]
    return place


def _resolved(schema: Schema) -> Schema:
    """Return what a reference stands for, the schema itself where it is none."""
    reference = schema.get("$ref")
    return _schema()["$defs"][reference.rpartition("/")[2]] if reference else schema


def _about(schema: Schema) -> str:
    # What is said of a section by itself stands at the section only, where both say the same.
    return str(schema.get("description") or _resolved(schema).get("description", ""))


def _key(name: str, schema: Schema, required: bool) -> Key:  # noqa: FBT001 - a fact, not a switch
    resolved = _resolved(schema)
    is_free = resolved.get("type") == "object"
    return Key(
        name,
        _words(resolved),
        schema.get("default", {} if is_free else None),
        _about(schema),
        required,
        schema.get("fixed", False),
        resolved.get("type") == "string",
        is_free,
    )


def _words(schema: Schema) -> str:
    schema = _resolved(schema)
    if "anyOf" in schema:
        return " or ".join(_words(part) for part in schema["anyOf"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "array":
        return _list(schema)
    bounds = [f"{word} {schema[bound]:g}" for bound, word in _BOUNDS.items() if bound in schema]
    return " ".join([_KINDS[schema["type"]], " and ".join(bounds)]).strip()


def _list(schema: Schema) -> str:
    if "prefixItems" in schema:
        parts = schema["prefixItems"]
        return f"a list of {len(parts)}, each {_words(parts[0])}"
    return f"a list, each {_words(schema['items'])}"
