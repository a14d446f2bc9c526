"""All keys of a file by their dotted names, read off its model's JSON Schema, and which of them is nearest."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
from syncd.jobfile.problems import shown

Schema = Mapping[str, Any]

NAME = "NAME"
"""What stands in dotted names for the name of a table that the user chooses: explorer.evaluation.sets.NAME.tasks."""

_CLOSE, _VERY_CLOSE = 0.6, 0.9
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
    name: str  # its dotted name
    expected: str  # what it takes, in words
    default: Any  # as plain data; None where there is none
    about: str  # what it means
    required: bool  # whether it must be given
    fixed: bool  # whether a later start must agree with it
    is_text: bool  # whether it takes text and nothing else
    is_free: bool  # whether it is a table of keys that are checked elsewhere
    is_repeated: bool  # whether it stands in a table of which there may be several: `[[table]]`
    code: str  # what marks that its value may name code: `syncd.jobfile.code_trust`; empty if it names none
    path: str  # "file" if it names a file or directory, "tasks" if that or tasks with a scheme; else empty


class Keys:
    """The keys of one kind of file, which `model` checks."""

    def __init__(self, model: "type[BaseModel]") -> None:
        self.model = model

    @cached_property
    def all(self) -> Mapping[str, Key]:
        return {key.name: key for _, part in self._walk() for key in part}

    @cached_property
    def tables(self) -> Mapping[str, str]:
        return {name: self._about(self._at(name)) for name, _ in self._walk() if name}

    def expected(self, key: str) -> str:
        if key in self.all:
            return self.all[key].expected
        return "a list of tables" if self.is_repeated(key) else _KINDS["object"]

    def is_repeated(self, table: str) -> bool:
        return self._resolved(self._at(table)).get("type") == "array"

    def takes_table(self, name: str) -> bool:
        return name in self.tables or self.all[name].is_free

    def owner(self, path: Sequence[str | int]) -> str:
        """Return the dotted name of the known key or table that a path leads to or into, empty if to none."""
        name = ""
        for part in path:
            if isinstance(part, int) and name in self.tables:
                continue  # which of several tables
            prefix = f"{name}." if name else ""
            longer = next(
                (
                    candidate
                    for candidate in (f"{prefix}{part}", f"{prefix}{NAME}")
                    if self._is_known(candidate)
                ),
                "",
            )
            if not longer:
                break
            name = longer
        return name

    def nearest(self, unknown: str) -> str | None:
        """Return the known key or table that was probably meant, wherever it is."""
        names = [*self.all, *self.tables]
        if ends := [name for name in names if name.endswith(f".{unknown}") and "." in unknown]:
            return ends[0]  # what most files give comes first
        table, _, last = unknown.rpartition(".")
        beside = [name for name in names if name.startswith(f"{table}.")]
        in_table = difflib.get_close_matches(unknown, beside, 1, _VERY_CLOSE)
        same = [name for name in names if _flat(name) in (_flat(unknown), _flat(last)) or _ends(name, last)]
        if likely := [*same, *in_table]:
            return max(likely, key=lambda name: difflib.SequenceMatcher(None, unknown, name).ratio())
        if near := difflib.get_close_matches(unknown, names, 1, _CLOSE):
            return near[0]
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        return next((by_last[name] for name in difflib.get_close_matches(last, by_last, 1, _CLOSE)), None)

    def choices(self, key: str) -> tuple[str, ...]:
        return tuple(_choices(self._resolved(self._at(key)), self._resolved))

    def example(self, key: str) -> str:
        return str(next(iter(self._at(key).get("examples", ())), ""))

    def documentation(self, only: str = "", without: str = "") -> str:
        """Return the keys of each table in Markdown, as the last part of a page.

        If `only` is given, those of that table and of all below it; not those of the table `without`.
        """
        tops = {name: name.partition(".")[0] for name in self.tables}
        names = [name for name, top in tops.items() if top != without and (not only or top == only)]
        return "\n".join(["## Keys\n", *(_documented(self, name) for name in names)])

    def _is_known(self, name: str) -> bool:
        return name in self.all or name in self.tables

    @cached_property
    def _schema(self) -> Schema:
        return self.model.model_json_schema()

    def _walk(self, table: str = "") -> Iterator[tuple[str, tuple[Key, ...]]]:
        """Yield the dotted name of a table, and of each one in it, with its own keys; the whole file has no name."""
        schema, is_repeated = self._table(self._at(table)), bool(table) and self.is_repeated(table)
        prefix = f"{table}." if table else ""
        below = {f"{prefix}{name}": part for name, part in schema["properties"].items()}
        inner = [name for name, part in below.items() if "properties" in self._table(part)]
        required = {f"{prefix}{name}" for name in schema.get("required", ())}
        yield (
            table,
            tuple(
                self._key(name, below[name], required=name in required, is_repeated=is_repeated)
                for name in below
                if name not in inner
            ),
        )
        for name in inner:
            yield from self._walk(name)
        for name in (name for name, part in below.items() if self._named_part(part)):
            yield from self._walk(f"{name}.{NAME}")

    def _at(self, name: str) -> Schema:
        schema = self._schema
        for part in name.split(".") if name else ():
            schema = self._named_part(schema) if part == NAME else self._table(schema)["properties"][part]
        return schema

    def _table(self, schema: Schema) -> Schema:
        """Return the schema of a table, of each one if there may be several."""
        resolved = self._resolved(schema)
        return self._resolved(resolved.get("items", {})) if resolved.get("type") == "array" else resolved

    def _named_part(self, schema: Schema) -> Schema:
        """Return the schema of each table in a table of tables of known keys, nothing for any other schema."""
        part = self._resolved(schema).get("additionalProperties")
        return part if isinstance(part, dict) and "properties" in self._resolved(part) else {}

    def _resolved(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return self._schema["$defs"][reference.rpartition("/")[2]] if reference else schema

    def _about(self, schema: Schema) -> str:
        # A section's own description is used if the key has none.
        return str(schema.get("description") or self._resolved(schema).get("description", ""))

    def _key(self, name: str, schema: Schema, *, required: bool, is_repeated: bool) -> Key:
        resolved = self._resolved(schema)
        is_free = resolved.get("type") == "object"
        return Key(
            name,
            self._words(resolved),
            schema.get("default", {} if is_free else None),
            self._about(schema),
            required,
            schema.get("fixed", False),
            resolved.get("type") == "string",
            is_free,
            is_repeated,
            schema.get("code", ""),
            schema.get("path", ""),
        )

    def _words(self, schema: Schema) -> str:
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return " or ".join(self._words(part) for part in schema["anyOf"])
        if "const" in schema:
            return f'"{schema["const"]}"'
        if "enum" in schema:
            return f"one of {', '.join(schema['enum'])}"
        if schema["type"] == "array":
            return self._list(schema)
        if "examples" in schema:
            return f"text such as {schema['examples'][0]}"
        bounds = [f"{word} {schema[bound]:g}" for bound, word in _BOUNDS.items() if bound in schema]
        return " ".join([_KINDS[schema["type"]], " and ".join(bounds)]).strip()

    def _list(self, schema: Schema) -> str:
        if "prefixItems" in schema:
            parts = schema["prefixItems"]
            return f"a list of {len(parts)}, each {self._words(parts[0])}"
        return f"a list, each {self._words(schema['items'])}"


def _choices(schema: Schema, resolved: Callable[[Schema], Schema]) -> Iterator[str]:
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    yield from map(str, schema.get("enum", [schema["const"]] if "const" in schema else ()))
    for part in schema.get("anyOf", ()):
        yield from _choices(resolved(part), resolved)


def _flat(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _ends(name: str, last: str) -> bool:
    return name.rpartition(".")[2] == last.replace("-", "_")


def _documented(keys: Keys, table: str) -> str:
    own = [key for key in keys.all.values() if key.name.rpartition(".")[0] == table]
    title = f"[[{table}]]" if keys.is_repeated(table) else f"[{table}]"
    return f"### {title}\n\n{keys.tables[table]}\n\n{_table(own, table)}\n"


def _table(own: Sequence[Key], table: str) -> str:
    rows = [_row(key, key.name.removeprefix(f"{table}.")) for key in own]
    return "\n".join(["| key | takes | default | |", "|---|---|---|---|", *rows])


def _row(key: Key, name: str) -> str:
    default = "**required**" if key.required else f"`{shown(key.default)}`"
    mark = " *fixed*" if key.fixed else ""
    return f"| `{name}` | {key.expected} | {default} | {key.about}{mark} |"
