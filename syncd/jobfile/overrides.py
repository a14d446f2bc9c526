"""`--section.key value`: the command line as a table like that of a file."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from syncd.errors import UsageError
from syncd.jobfile.keys import Keys

_FLAG = re.compile(r"--([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)(?:=(.*))?", re.DOTALL)


def parse_overrides(arguments: Sequence[str], keys: Keys) -> dict[str, Any]:
    """Return the table that `--section.key value` and `--section.key=value` make; of two the later one counts.

    A value is what TOML makes of it, and text where TOML makes nothing of it or the key takes only text.

    Raises:
        UsageError: An argument is no `--key`, or a key has no value.
    """
    table: dict[str, Any] = {}
    for name, text in _pairs(list(arguments)):
        *path, last = name.split(".")
        place = table
        for part in path:
            below = place.get(part)
            place[part] = place = below if isinstance(below, dict) else {}
        place[last] = _value(name, text, keys)
    return table


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables as one: tables in both are merged, else the upper one's value counts."""
    both = dict(lower)
    for name, value in upper.items():
        below = both.get(name)
        both[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    while arguments:
        argument = arguments.pop(0)
        match = _FLAG.fullmatch(argument)
        if match is None:
            raise UsageError(f"not an option: {argument!r}", hint="write --section.key value")
        name, text = match[1], match[2]
        if text is None:
            if not arguments or arguments[0].startswith("--"):
                raise UsageError(f"--{name} has no value", hint=f"write --{name} VALUE or --{name}=VALUE")
            text = arguments.pop(0)
        yield name, text


def _value(name: str, text: str, keys: Keys) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if document.keys() != {"value"}:
        return text
    value = document["value"]
    key = keys.all.get(keys.owner(name.split(".")))
    takes_text = key is not None and key.is_text
    return text if takes_text and not isinstance(value, str) else value
