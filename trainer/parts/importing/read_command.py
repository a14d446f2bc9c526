"""Reads settings from commands: `key=value` as verl's scripts give them, `--key value` as TRL's do. Nothing is run.

Of a shell script only assignments, `$NAME`, `${NAME}`, `${NAME:-default}` and whole-number arithmetic are understood.
Options that a variable holds stand in its place. A value that needs more stays unresolved, and so does one that the
script gives twice, or under a condition: which of them counts, only a run would tell.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from trainer.parts.importing.configuration import Unresolved
from trainer.parts.importing.read_yaml import read_scalar

_OVERRIDE = re.compile(r"\+{0,2}([a-z_][a-z0-9_]*(?:\.[A-Za-z0-9_]+)+)=(.*)", re.DOTALL)
_DELETED = re.compile(r"~([a-z_][a-z0-9_]*(?:\.[A-Za-z0-9_]+)+)(?:=.*)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_SUM = re.compile(r"\$\(\((.*?)\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LEFT = re.compile(r"[$`]")
_ARRAY = re.compile(r"(?<=[A-Za-z0-9_+])=\((?!\s)((?:[^()]|\$\([^()]*\))*)\)")
_CONDITIONS = {"if": "fi", "case": "esac"}
_SKIPPED = frozenset({"export", "local", "readonly"})
_LISTS = frozenset(
    {"lora_target_modules", "lora_modules_to_save", "reward_funcs", "reward_weights", "report_to"}
)
"""Arguments of TRL's scripts that take several values."""

_COMPOSED = "defaults"
"""The key of the files that Hydra composes; `--config-name` names one."""

_UNKNOWN = Unresolved("depends on what only the script's run would tell")
_MOST = 1 << 53

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_command(text: str) -> dict[str, Any]:
    words, unknown = _spliced(_words(text))
    overrides, variables = dict[str, Any](), dict[str, str | None]()
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            _add(overrides, match[1], _value(match[2], variables))
        elif match := _ASSIGNMENT.fullmatch(word):
            name, appends, given = match.groups()
            value = None if appends else _expanded(given, variables)
            variables[name] = value if variables.get(name, value) == value else None
        elif match := _DELETED.fullmatch(word):
            _add(overrides, match[1], Unresolved("is deleted by the command"))
    flags = dict[str, Any]()
    for name, values in _flags(words):
        read = [_value(value, variables) for value in values]
        if not overrides:
            _add(flags, name, _flag_value(read))
        elif name == "config-name" and len(read) == 1:
            flags[_COMPOSED] = [str(read[0]).removesuffix(".yaml")]
    return {**overrides, **flags, **unknown}


def _flag_value(values: Sequence[Any]) -> Any:
    """Return true for a flag alone, and a list for several values."""
    unknown = next((value for value in values if isinstance(value, Unresolved)), None)
    return unknown or (values[0] if len(values) == 1 else list(values) or True)


def _words(text: str) -> list[str]:
    arithmetic = _SUM.sub(lambda match: match[0].replace(" ", ""), text.replace("\\\n", " "))
    arrays = _ARRAY.sub(r" \1 ", arithmetic)
    spread = re.sub(r"=\(\s|(?<=\s)[();](?=\s|$)|;(?=\s)", " ", arrays)
    return list(_marked(word for word in shlex.split(spread, comments=True) if word not in _SKIPPED))


def _marked(words: Iterable[str]) -> Iterator[str]:
    """Yield words; what a condition or a loop assigns is appended, so that what the variable holds is not known."""
    depth, before = 0, ""
    for word in words:
        depth += (word in _CONDITIONS) - (word in _CONDITIONS.values())
        match = _ASSIGNMENT.fullmatch(word)
        if before == "for":
            yield f"{word}+="
        else:
            yield f"{match[1]}+={match[3]}" if match and depth > 0 else word
        before = word


def _spliced(words: Sequence[str]) -> tuple[list[str], dict[str, Unresolved]]:
    """Return words with the options that a variable holds in its place, and the variables that hold unknown ones."""
    texts, holders = dict[str, str | None](), set[str]()
    spliced, unknown = list[str](), dict[str, Unresolved]()
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            name, appends, text = match.groups()
            text = _VARIABLE.sub(lambda other: texts.get(other[1] or other[2]) or other[0], text)
            others = [other[1] or other[2] for other in _VARIABLE.finditer(text)]
            is_open = not holders.isdisjoint(others)  # what one of them holds is not known
            is_known = not appends and not is_open and texts.get(name, text) == text
            texts[name] = text if is_known else None
            holders |= {name} if is_open or _holds_options(text) else set()
        variable = _VARIABLE.fullmatch(word)
        name = (variable[1] or variable[2]) if variable else ""
        held = texts.get(name, os.environ.get(name, variable[3] or "")) if variable else ""
        if held is None and name in holders:
            unknown[name] = _UNKNOWN
        elif held and _holds_options(held):
            spliced += shlex.split(held)
        else:
            spliced.append(word)
    return spliced, unknown


def _holds_options(text: str) -> bool:
    return any(_OVERRIDE.fullmatch(word) or _FLAG.fullmatch(word) for word in text.split())


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield `--name value`, `--name=value` and `--name` alone, each with its values."""
    for index, word in enumerate(words):
        if match := _FLAG.fullmatch(word):
            after = list(takewhile(lambda word: not word.startswith("--"), words[index + 1 :]))
            values = after if match[1] in _LISTS else after[:1]
            yield match[1], values if match[2] is None else [match[2]]


def _add(settings: dict[str, Any], name: str, value: Any) -> None:
    if name in settings and settings[name] != value:
        value = Unresolved("is given twice with different values")
    settings[name] = value


def _value(text: str, variables: Mapping[str, str | None]) -> Any:
    expanded = _expanded(text, variables)
    if expanded is None:
        return _UNKNOWN
    return read_scalar(expanded)


def _expanded(text: str, variables: Mapping[str, str | None]) -> str | None:
    """Return text with its variables and sums in place, None if something of it cannot be known."""
    lost = False

    def value_of(match: re.Match[str]) -> str:
        nonlocal lost
        name = match[1] or match[2]
        value = variables[name] if name in variables else os.environ.get(name, match[3])
        lost = lost or value is None
        return value or match[3] or ""

    expanded = _VARIABLE.sub(value_of, text)
    expanded = _SUM.sub(lambda match: _sum(match[1], variables), expanded)
    return None if lost or _LEFT.search(expanded) else expanded


def _sum(text: str, variables: Mapping[str, str | None]) -> str:
    """Return the value of a sum of whole numbers, `$` if it is none."""
    named = _NAME.sub(lambda match: variables.get(match[0]) or "?", text)
    try:
        return str(_number(ast.parse(named.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return "$"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= _MOST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not a sum of whole numbers")
