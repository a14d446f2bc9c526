"""From a file and the command line to a checked model, or to all that is wrong."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncd.errors import ConfigError
from syncd.jobfile.keys import Keys
from syncd.jobfile.overrides import merged, parse_overrides
from syncd.jobfile.problems import Problem, shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

COMMAND_LINE = "the command line"

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys from one place; those of later layers count.

    Args:
        table: The keys, as TOML gives them.
        where: What errors call the place.
        directory: What relative paths are relative to.
    """

    table: Mapping[str, Any]
    where: str
    directory: str


def read_toml(path: str) -> tuple[dict[str, Any], str]:
    """Return a file's table and its text.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        return tomllib.loads(text), text
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", path=path) from error


def layer_of(table: Mapping[str, Any], path: str) -> Layer:
    """Return what a file says; relative paths are relative to its directory."""
    return Layer(table, path, os.path.dirname(os.path.abspath(path)))


def command_layer(overrides: Sequence[str], keys: Keys) -> Layer:
    """Return what the command line says.

    Raises:
        UsageError: It is not `--section.key value`.
    """
    return Layer(parse_overrides(overrides, keys), COMMAND_LINE, os.getcwd())


def validated(
    keys: Keys, layers: Sequence[Layer], required: Sequence[str]
) -> "tuple[BaseModel | None, list[Problem]]":
    """Return the model that layers make, None if there is none, and all that is wrong with each key by itself.

    Args:
        keys: The keys of the file.
        layers: The file first, the command line last.
        required: Tables that count as there, so that what they lack is named key by key.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - reading a file must not need it before

    problems = [problem for layer in layers for problem in _unset_variables(keys, layer)]
    table: dict[str, Any] = {name: {} for name in required}
    for layer in layers:
        table = merged(table, _with_places(keys, layer))
    try:
        return keys.model.model_validate(table), problems
    except ValidationError as error:
        return None, [*problems, *_schema_problems(keys, error, layers)]


def placed(problems: Iterator[Problem], layers: Sequence[Layer]) -> list[Problem]:
    """Return problems with the place that each one's key was given in."""
    return [replace(problem, where=_where(problem.key, layers)) for problem in problems]


def _schema_problems(keys: Keys, error: "ValidationError", layers: Sequence[Layer]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        problem = _schema_problem(keys, detail["loc"], detail["type"], layers)
        found.setdefault(problem.key, replace(problem, where=_where(problem.key, layers)))
    return list(found.values())


def _schema_problem(keys: Keys, path: Sequence[str | int], kind: str, layers: Sequence[Layer]) -> Problem:
    key, whole = keys.owner(path), ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        near = keys.nearest(whole)
        return Problem(whole, f"unknown key {whole}", f"did you mean {near}?" if near else None)
    if kind == "missing" and whole == key:
        return Problem(key, f"{key} is missing")
    return Problem(key, f"{key} = {shown(_given(key, layers))} is not {keys.expected(key)}")


def _where(key: str, layers: Sequence[Layer]) -> str:
    """Return the last place that gives a key, the first of all where none does."""
    return next((layer.where for layer in reversed(layers) if _has(layer.table, key)), layers[0].where)


def _given(key: str, layers: Sequence[Layer]) -> Any:
    return next((_get(layer.table, key) for layer in reversed(layers) if _has(layer.table, key)), None)


def _has(table: Mapping[str, Any], key: str) -> bool:
    *path, last = key.split(".")
    place: Any = table
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    return isinstance(place, dict) and last in place


def _get(table: Mapping[str, Any], key: str) -> Any:
    place: Any = table
    for part in key.split("."):
        place = place[part]
    return place


def _with_places(keys: Keys, layer: Layer) -> dict[str, Any]:
    """Return a layer's table with its paths made absolute; the empty one and what is no text are left alone."""
    table: dict[str, Any] = dict(layer.table)
    for key in keys.paths:
        if _has(table, key) and isinstance(path := _get(table, key), str) and path:
            place: Any = _place(path, layer.directory)
            for part in reversed(key.split(".")):
                place = {part: place}
            table = merged(table, place)
    return table


def _place(path: str, directory: str) -> str:
    expanded = os.path.expandvars(os.path.expanduser(path))
    return os.path.normpath(os.path.join(directory, expanded))


def _unset_variables(keys: Keys, layer: Layer) -> list[Problem]:
    found = []
    for key in keys.paths:
        path = _get(layer.table, key) if _has(layer.table, key) else None
        if isinstance(path, str) and (left := _VARIABLE.search(os.path.expandvars(path))):
            text = f"{key} = {shown(path)} names {left[0]}, which is not set"
            found.append(Problem(key, text, where=layer.where))
    return found
