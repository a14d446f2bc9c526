"""The one loader of the job's file: layers of keys to a checked model, or one error with all problems.

pydantic-settings is not used: it merges its sources before it validates, so no error could name the file, the stage
or the command line that gave a value; its command line ends the process at the first unknown flag, without the
nearest key; and its values are JSON, where those of a job's file are TOML.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from syncd.config import load as load_daemon
from syncd.errors import ConfigError, UsageError
from syncd.jobfile.code_trust import names_code, require_own_file
from syncd.jobfile.engine_options import options_keys
from syncd.jobfile.keys import NAME, Key, Keys
from syncd.jobfile.model import KEYS, JobFile
from syncd.jobfile.problems import Problem, error_of, shown
from syncd.jobfile.task_sets import SCHEMES

COMMAND_LINE = "the command line"

Mark = TypeVar("Mark")

_FLAG = re.compile(r"--([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)(?:=(.*))?", re.DOTALL)
_SCHEMES = tuple(f"{scheme}:" for scheme in SCHEMES)
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys from one origin; a later layer overrides an earlier one."""

    table: Mapping[str, Any]  # the keys, as TOML gives them
    where: str  # what errors call the origin
    directory: str  # what relative paths are relative to
    read: "TomlFile | None" = None  # the file that was read; None for what the command line gives

    def of_stage(self, entry: Mapping[str, Any]) -> "tuple[Layer, Layer]":
        """Return the keys of a file that all its stages share, and those that one stage gives."""
        common = {name: part for name, part in self.table.items() if name != "stages"}
        own = {name: part for name, part in entry.items() if name != "name"}
        where = f"{self.where}, stage {entry['name']!r}"
        return replace(self, table=common), replace(self, table=own, where=where)


class Loader:
    """Reads the job's file as one program needs it: all tables are checked, whoever reads them.

    Args:
        tables: Those whose paths this program resolves, and whose code it may run.
        required: Tables that count as given, so that the keys that they lack are named one by one.
        check: Yields the problems that no single key shows.
        hint: What to run if there are several problems.
    """

    def __init__(
        self,
        *,
        tables: Sequence[str],
        required: Sequence[str],
        check: Callable[[JobFile], Iterable[Problem]],
        hint: str,
    ) -> None:
        self.hint = hint
        self._required, self._check = required, check
        own = {name: key for name, key in KEYS.all.items() if name.partition(".")[0] in tables}
        self._paths = {name: key for name, key in own.items() if key.path}
        self._code = {name: key.code for name, key in own.items() if key.code}

    def command_layer(self, overrides: Sequence[str]) -> Layer:
        return Layer(parse_overrides(overrides, KEYS), COMMAND_LINE, os.getcwd())

    def validate(self, layers: Sequence[Layer]) -> tuple[JobFile | None, list[Problem]]:
        """Return the model of the layers, None if a key is wrong by itself, and all problems."""
        problems = [problem for layer in layers for problem in _unset_variables(self._paths, layer)]
        table: dict[str, Any] = {name: {} for name in self._required}
        for layer in layers:
            table = merged(table, _with_absolute_paths(self._paths, layer))
        more = [*daemon_problems(table)]
        file: JobFile | None = None
        try:
            file = JobFile.model_validate(table)
            more += self._check(file)
        except ValidationError as error:
            problems += _schema_problems(KEYS, error, layers)
        problems += _engine_problems(table.get("engine"), layers)
        return file, [*problems, *(replace(problem, where=_where(problem.key, layers)) for problem in more)]

    def load(self, layers: Sequence[Layer], path: str, *, trust: bool = False) -> JobFile:
        """Return the model of the layers, with the file that they come from as `job.source`.

        Args:
            layers: The file first, the command line last.
            trust: Whether the code that it names may run, whoever could have written it.
        """
        file, problems = self.validate(layers)
        if file is None or problems:
            raise error_of(problems, self.hint)
        if not trust:
            self.require_own_code(layers)
        return file.with_source(path)

    def require_own_code(self, layers: Sequence[Layer]) -> None:
        """Refuse code that a file in a job names and another user could have written."""
        command = layers[-1].table if layers[-1].read is None else {}
        for layer in layers:
            for key, mark in _expanded(self._code, layer.table) if layer.read else ():
                values = values_at(layer.table, key)
                if not values or (values_at(command, key) and not isinstance(values[0], dict)):
                    continue
                if layer.read and names_code(mark, values[0]):
                    require_own_file(
                        layer.read.path,
                        layer.read.status,
                        layer.directory,
                        key,
                        values[0],
                        is_kept=layer.read.is_kept,
                    )


@dataclass(frozen=True, slots=True)
class TomlFile:
    path: str
    table: dict[str, Any]  # its keys
    text: str
    status: os.stat_result  # what `os.fstat` said of it
    is_kept: bool = False  # whether it was found by way of a job, not named

    def layer(self, source: str = "") -> Layer:
        """Return its keys as a layer; relative paths are relative to its directory, or to that of `source`."""
        return Layer(self.table, self.path, os.path.dirname(os.path.abspath(source or self.path)), self)


def read_toml(path: str) -> TomlFile:
    try:
        with open(path, "rb") as file:
            text, status = file.read().decode(), os.fstat(file.fileno())
        return TomlFile(path, tomllib.loads(text), text, status)
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", path=path, hint=f"ls -lL {shlex.quote(str(path))}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", path=path) from error


def parse_overrides(arguments: Sequence[str], keys: Keys) -> dict[str, Any]:
    """Return the table that `--section.key value` and `--section.key=value` make; the last of equal keys counts.

    A value is parsed as TOML; it is text if it is not TOML or if the key takes only text.
    """
    table: dict[str, Any] = {}
    for name, text in _pairs(list(arguments)):
        *path, last = name.split(".")
        below_table = table
        for part in path:
            below = below_table.get(part)
            below_table[part] = below_table = below if isinstance(below, dict) else {}
        below_table[last] = _value(name, text, keys)
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
    except (ValueError, RecursionError):
        return text
    if document.keys() != {"value"}:
        return text
    value = document["value"]
    key = keys.all.get(keys.owner(name.split(".")))
    takes_text = key is not None and key.is_text
    return text if takes_text and not isinstance(value, str) else value


def _schema_problems(keys: Keys, error: ValidationError, layers: Sequence[Layer]) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        problem = _schema_problem(keys, detail["loc"], detail["type"], layers)
        problems.setdefault(problem.key, replace(problem, where=_where(problem.key, layers)))
    return list(problems.values())


def _schema_problem(keys: Keys, path: Sequence[str | int], kind: str, layers: Sequence[Layer]) -> Problem:
    owner, whole = keys.owner(path), ".".join(str(part) for part in path)
    named = [str(part) for part in path if not isinstance(part, int)]  # which of several tables, or of a list
    key = ".".join(named[: owner.count(".") + 1]) if owner else ""
    if kind == "extra_forbidden":
        values = [value for layer in layers for value in values_at(layer.table, whole)]
        is_table = any(isinstance(value, dict) for value in values)
        return _unknown_table(keys, whole) if is_table else _unknown_key(keys, whole)
    if kind == "missing" and path[-1] == key.rpartition(".")[2]:
        example = keys.example(owner)
        hint = f'{path[-1]} = "{example}"' if example else None
        return Problem(key, f"{key} is missing", hint)
    wrong = next((value for layer in reversed(layers) for value in values_at(layer.table, key, path)), None)
    return Problem(key, f"{key} = {shown(wrong)} is not {keys.expected(owner)}")


def _unknown_key(keys: Keys, key: str) -> Problem:
    near = keys.nearest(key)
    return Problem(key, f"unknown key {key}", f"did you mean {near}?" if near else None)


def _unknown_table(keys: Keys, table: str) -> Problem:
    """Return the problem of a table that is misspelt, or of a part that is not installed."""
    near = keys.nearest(table)
    is_near = near is not None and keys.takes_table(near)
    hint = f"did you mean {near}?" if is_near else "leave the table out"
    return Problem(table, f"unknown key {table}, a table that nothing installed reads", hint)


def _engine_problems(engine: object, layers: Sequence[Layer]) -> list[Problem]:
    """Return what is wrong with the options of the engine that the file names, if that registers what it takes."""
    table = {"options": {}, **engine} if isinstance(engine, dict) else {}
    keys = options_keys(str(table.get("name")))
    if keys is None or not isinstance(table["options"], dict):
        return []
    try:
        keys.model.model_validate({"engine": table})
    except ValidationError as error:
        return _schema_problems(keys, error, layers)
    return []


def _where(key: str, layers: Sequence[Layer]) -> str:
    """Return the last origin that gives a key, the first of all if none does."""
    return next(
        (layer.where for layer in reversed(layers) for _ in values_at(layer.table, key)), layers[0].where
    )


def values_at(table: Mapping[str, Any], key: str, path: Sequence[str | int] = ()) -> list[Any]:
    """Return the value of a dotted key in a list, an empty list if the table does not give it.

    `path` is where a problem with it is: it says which one of several tables is meant.
    """
    value: Any = table
    numbers = iter([part for part in path if isinstance(part, int)])
    for part in key.split("."):
        if isinstance(value, list):
            number = next(numbers, 0)
            value = value[number] if number < len(value) else None
        if not isinstance(value, dict) or part not in value:
            return []
        value = value[part]
    return [value]


def _expanded(marked: Mapping[str, Mark], table: Mapping[str, Any]) -> Iterator[tuple[str, Mark]]:
    """Yield some keys with what marks them, those in tables that the user names with these names."""
    for key, mark in marked.items():
        above, _, below = key.partition(f".{NAME}.")
        names = [
            name
            for table_below in values_at(table, above)
            if below and isinstance(table_below, dict)
            for name in table_below
        ]
        yield from ((f"{above}.{name}.{below}", mark) for name in names)
        if not below:
            yield key, mark


def _with_absolute_paths(keys: Mapping[str, Key], layer: Layer) -> dict[str, Any]:
    """Return a layer's table with its paths made absolute; empty paths and values that are not text stay."""
    table: dict[str, Any] = dict(layer.table)
    for name, path in _given_paths(keys, layer):
        expanded = os.path.expandvars(os.path.expanduser(path))
        nested: Any = os.path.normpath(os.path.join(layer.directory, expanded))
        for part in reversed(name.split(".")):
            nested = {part: nested}
        table = merged(table, nested)
    return table


def _unset_variables(keys: Mapping[str, Key], layer: Layer) -> Iterator[Problem]:
    for name, path in _given_paths(keys, layer):
        if left := _VARIABLE.search(os.path.expandvars(path)):
            text = f"{name} = {shown(path)} names {left[0]}, which is not set"
            yield Problem(name, text, where=layer.where)


def _given_paths(keys: Mapping[str, Key], layer: Layer) -> Iterator[tuple[str, str]]:
    """Yield the keys of a layer that name a file or directory, with what they name."""
    for name, key in _expanded(keys, layer.table):
        for path in values_at(layer.table, name):
            has_scheme = key.path == "tasks" and str(path).startswith(_SCHEMES)
            if isinstance(path, str) and path and not has_scheme:
                yield name, path


def daemon_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what the daemon refuses in its table of a whole file, key by key."""
    table = document.get("daemon")
    for name, value in table.items() if isinstance(table, dict) else ():
        try:
            load_daemon(None, {name: value}, document=document)
        except ConfigError as error:
            yield Problem(f"daemon.{name}", f"daemon.{name}: {error.message}", error.hint)
