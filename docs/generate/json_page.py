"""The tables of docs/json.md, and docs/json-schema.json: what `--json` prints, from the types of `json_documents`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_WORDS = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "object",
    "null": "null",
}
_PAIR = "Pair"
_NO_TABLE = {_PAIR, "Serving"}
"""Objects that the head of the page or another table describes."""


def parts() -> Mapping[str, str]:
    """Return the tables of each command's document by the command."""
    shown = set(_NO_TABLE)
    return {name: "\n".join(_tables(_schema(kind), shown)) for name, kind in _documents().items()}


def schemas() -> str:
    """Return the JSON Schema of every document by its command, as a file."""
    title = "What commands of syncd print with --json, and what routes of syncd serve answer"
    documents = {name: _open(_schema(kind)) for name, kind in _documents().items()}
    return json.dumps({"title": title, "documents": documents}, indent=1, sort_keys=True) + "\n"


def _documents() -> Mapping[str, type[Any]]:
    from http_documents import ROUTES  # noqa: PLC0415 - needs pydantic
    from json_documents import DOCUMENTS  # noqa: PLC0415
    from program_documents import PROGRAMS  # noqa: PLC0415

    return {**DOCUMENTS, **PROGRAMS, **ROUTES}


def _open(schema: Any) -> Any:
    """Return a schema that allows further fields: a release may add some."""
    if isinstance(schema, Mapping):
        return {key: _open(part) for key, part in schema.items() if key != "additionalProperties"}
    return [_open(part) for part in schema] if isinstance(schema, list) else schema


def _schema(kind: type[Any]) -> Schema:
    from pydantic import TypeAdapter  # noqa: PLC0415

    return TypeAdapter(kind).json_schema()


def _tables(schema: Schema, shown: set[str]) -> Iterator[str]:
    """Yield the lines of the table of a document, then those of each object in it that no document had before."""
    yield from _table("field", schema)
    definitions = schema.get("$defs", {})
    open_objects = list(_objects(schema))
    while open_objects:
        field, name = open_objects.pop(0)
        if name not in shown:
            shown.add(name)
            yield ""
            yield from _table(f"field of `{field}`", definitions[name])
            open_objects += _objects(definitions[name])


def _table(title: str, schema: Schema) -> Iterator[str]:
    yield from (f"| {title} | type | meaning |", "|---|---|---|")
    for name, field in schema["properties"].items():
        about = str(field.get("description", ""))
        yield f"| `{name}` | {_type(field)} | {about[:1].lower()}{about[1:].rstrip('.')} |"


def _objects(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield the fields that hold objects with the name of the object."""
    for name, field in schema["properties"].items():
        for part in (field, field.get("items", {}), *field.get("anyOf", ())):
            if "$ref" in part:
                yield name, part["$ref"].rpartition("/")[2]


def _type(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"])
    if "$ref" in field:
        return "version" if field["$ref"].endswith(f"/{_PAIR}") else "object"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if field.get("type") == "array":
        return f"list of {_plural(_type(field['items']))}"
    return _WORDS[field["type"]] if "type" in field else "value"


def _plural(word: str) -> str:
    first, *others = word.split(" ")
    return " ".join([first if first == "text" else f"{first}s", *others])
