"""The tables of all projects: what becomes of each of their keys, from one TOML a project in this folder.

A row is of one of four kinds: its keys become keys of ours, are not needed here, are left to the user, or cannot be
mapped. The last kind stops an import unless the value is one that turns the feature off.
"""

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from syncd.errors import DOCS, UsageError

PROJECTS = ("trinity", "verl", "prime-rl", "trl")
"""By the names that `trainer import --from` takes; each has a file of that name."""

KINDS = ("mapped", "not_needed", "by_hand", "unsupported")
_PAGE = re.compile(r"\bdocs/(?=[\w-]+\.md)")


@dataclass(frozen=True, slots=True)
class Row:
    kind: str  # what becomes of them, of `KINDS`
    theirs: tuple[str, ...]  # the keys; `*` stands for any text, also with dots
    ours: tuple[str, ...]  # the keys that they set, or that stand for them where they cannot be mapped
    # How they are mapped, why they are not needed, what is left to do, or why they cannot be mapped.
    about: str
    off: tuple[Any, ...]  # values that need no counterpart
    instead: str  # what to do where they cannot be mapped
    spec: Mapping[str, Any]  # how values are made of them, as `evaluate` reads it

    def matches(self, key: str) -> bool:
        return any(key == name or ("*" in name and fnmatchcase(key, name)) for name in self.theirs)


@dataclass(frozen=True, slots=True)
class Table:
    name: str  # what `--from` calls it
    title: str  # what people call it
    read: str  # the release whose keys these are
    rows: tuple[Row, ...]
    facts: Mapping[str, Any]  # specifications that rows refer to by name
    defaults: Mapping[str, Any]  # its defaults where a value changes what is trained and is not ours
    # Keys, or beginnings of keys with a dot at the end, by which its files are recognised.
    marks: tuple[str, ...]

    def is_marked(self, values: Mapping[str, Any]) -> bool:
        return any(
            key == mark or (mark[-1] == "." and key.startswith(mark)) for key in values for mark in self.marks
        )


@functools.cache
def read_table(name: str) -> Table:
    with open(f"{os.path.dirname(__file__)}/{name}.toml", encoding="utf-8") as file:
        document = tomllib.loads(_PAGE.sub(f"{DOCS}/", file.read()))
    rows = tuple(map(_row, document["row"]))
    facts, defaults, marks = document.get("facts", {}), document["defaults"], tuple(document["marks"])
    return Table(name, document["title"], document["read"], rows, facts, defaults, marks)


def _row(fields: dict[str, Any]) -> Row:
    kind = next(kind for kind in KINDS if kind in fields)
    theirs = _tuple(fields.pop(kind))
    ours = _tuple(fields.pop("ours", list(fields.get("set", ()))))
    about, off, instead = fields.pop("about", ""), tuple(fields.pop("off", ())), fields.get("instead", "")
    spec = {"key": [key for key in theirs if "*" not in key], **fields}
    return Row(kind, theirs, ours, about, off, instead, spec)


def _tuple(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def table_of(values: Mapping[str, Any], name: str | None, path: str) -> Table:
    """Return the table of a file, by the name that the user gives, else by the keys."""
    if name is not None:
        return read_table(name)
    marked = [table for table in map(read_table, PROJECTS) if table.is_marked(values)]
    if len(marked) == 1:
        return marked[0]
    what = " and ".join(table.title for table in marked) if marked else "no known project"
    raise UsageError(f"its keys look like {what}", path=path, hint=f"--from {' or '.join(PROJECTS)}")
