"""Writes a job's file as TOML: table by table, each key with where its value comes from."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from syncd.jobfile.model import KEYS, JobFile
from trainer.parts.importing.apply import Entry

_WIDTH = 44
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def job_text(entries: Mapping[str, Entry], head: str) -> str:
    """Return entries as TOML, table by table in the order of docs/configuration.md."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for table in sorted({_table(key) for key in entries}, key=lambda name: (_place(name)[0], name)):
        lines += ["", f"[{table}]"]
        own = sorted((key for key in entries if _table(key) == table), key=_place)
        lines += [_line(key, entries[key]) for key in own if not _is_tables(entries[key].value)]
        lines += [
            line for key in own if _is_tables(entries[key].value) for line in _tables(key, entries[key])
        ]
    return "\n".join([*lines, ""])


def _table(key: str) -> str:
    return key.rpartition(".")[0]


def _place(name: str) -> tuple[int, int, str]:
    """Return where a key or table stands: as in the documentation, what is not there last in its section."""
    sections, keys = list(JobFile.model_fields), list(KEYS.all)
    rank = keys.index(name) if name in keys else len(keys)
    return sections.index(name.partition(".")[0]), rank, name


def _line(key: str, entry: Entry) -> str:
    name = _key(key.rpartition(".")[2])
    return f"{f'{name} = {_value(entry.value)}':{_WIDTH}}  # {_origin(entry)}"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _tables(key: str, entry: Entry) -> Iterator[str]:
    for table in entry.value:
        yield ""
        yield f"{f'[[{key}]]':{_WIDTH}}  # {_origin(entry)}"
        yield from (f"{_key(name)} = {_value(value)}" for name, value in table.items())


def _origin(entry: Entry) -> str:
    return entry.origin if entry.is_given else f"default of {entry.origin}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)
