"""Reads a file of another trainer to values by dotted keys. Nothing of it is run, and its size is bounded."""

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from syncd.errors import DOCS, ConfigError, UsageError, storage_errors
from trainer.parts.importing.configuration import Unresolved
from trainer.parts.importing.read_command import read_command
from trainer.parts.importing.read_yaml import YamlError, read_scalar, read_yaml

_MOST_BYTES = 4 << 20
_MOST_DEPTH = 32
_MOST_VALUES = 20_000
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MISSING = "???"
_OF_PROGRAM = (
    "write the arguments of its config to a file of YAML, as `trl grpo --config FILE` takes them, or the command that"
    f" starts it to a .sh, and import that: {DOCS}/migrate.md"
)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return table


_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".yaml": ("YAML", read_yaml),
    ".yml": ("YAML", read_yaml),
    ".toml": ("TOML", tomllib.loads),
    ".json": ("JSON", _json),
    ".sh": ("a shell script", read_command),
    ".txt": ("a command's arguments", read_command),
}


def read_source(path: str) -> dict[str, Any]:
    """Return the values of a file by their dotted keys; items of a list of tables have their number in the key."""
    end = os.path.splitext(path)[1].lower()
    reader = _READERS.get(end)
    if end == ".py":
        raise UsageError(
            "a Python program is not run, so its settings are not known", path=path, hint=_OF_PROGRAM
        )
    if reader is None:
        ends = ", ".join(_READERS)
        raise UsageError(
            "the suffix of the file's name is no known format", path=path, hint=f"rename it: {ends}"
        )
    name, read = reader
    try:
        return dict(_flat(read(_text(path))))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"not {name} that can be imported: {reason}", path=path) from error


def _text(path: str) -> str:
    with storage_errors(path):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("not a file", path=path)
        if status.st_size > _MOST_BYTES:
            raise ConfigError(f"larger than {_MOST_BYTES >> 20} MiB, which no configuration is", path=path)
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode()


def _flat(document: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(document, Mapping):
        raise YamlError("it is not a table of keys")
    for count, pair in enumerate(_below("", document, 0)):
        if count == _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
        yield pair


def _below(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_DEPTH:
        raise ValueError(f"it nests deeper than {_MOST_DEPTH} tables; does an anchor hold itself?")
    is_tables = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if isinstance(value, dict) and (value or not name):
        parts: Iterator[tuple[Any, Any]] = iter(value.items())
    elif is_tables:
        parts = iter(enumerate(value))
    else:
        _check_leaf(name, value)
        yield name, None if value == _MISSING else value
        return
    for part, inner in parts:
        if not isinstance(part, str | int):
            raise YamlError(f"a key below {name or 'the top'} is not text")
        yield from _below(f"{name}.{part}" if name else str(part), inner, depth + 1)


def _check_leaf(name: str, value: Any) -> None:
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        raise ValueError(f"{name} is a list of lists")


def read_setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: not KEY=VALUE", hint="--set trainer.total_training_steps=200")
    return key, read_scalar(value)


def resolve(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with `${...}` in place, as OmegaConf writes references and environment variables.

    What is not there becomes `Unresolved`, and stops an import only where the value matters.
    """
    references = {**defaults, **values}
    return {key: _resolved(key, value, references) for key, value in values.items()}


def _resolved(key: str, value: Any, references: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        items = [_resolved(key, item, references) for item in value]
        return next((item for item in items if isinstance(item, Unresolved)), items)
    for _ in range(_MOST_DEPTH):
        if not isinstance(value, str) or not (match := _REFERENCE.search(value)):
            return value
        target = _target(key, match[1], references)
        if isinstance(target, Unresolved):
            return target
        is_whole = match[0] == value
        value = target if is_whole else value.replace(match[0], "" if target is None else str(target))
    return Unresolved("refers to itself")


def _target(key: str, reference: str, references: Mapping[str, Any]) -> Any:
    kind, colon, rest = reference.partition(":")
    name, comma, default = (part.strip() for part in (rest if colon else reference).partition(","))
    if colon and kind.strip() not in ("oc.env", "oc.select"):
        return Unresolved(f"needs the resolver {kind.strip()}, which is not here")
    if kind.strip() == "oc.env" and colon:
        target = os.environ.get(name)
        missing = f"names the environment variable {name}, which is not set"
    else:
        target = references.get(_absolute(key, name))
        missing = f"refers to {name}, which is not in the file"
    if target is not None:
        return target
    return read_scalar(default) if comma else Unresolved(missing)


def _absolute(key: str, name: str) -> str:
    """Return the dotted key that a reference names; each dot at its beginning leads one table up."""
    ups = len(name) - len(name.lstrip("."))
    if not ups:
        return name
    above = key.split(".")[:-ups]
    return ".".join([*above, name[ups:]])
