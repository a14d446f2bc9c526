"""From a file and the command line to a configuration, or to one error that says all that is wrong."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from syncd.errors import ConfigError
from trainer.config import checks
from trainer.config.keys import PATHS, expected, nearest, owner
from trainer.config.model import JobConfig
from trainer.config.overrides import merged, parse_overrides
from trainer.config.problems import Problem, error_of, shown

COMMAND_LINE = "the command line"
FIRST_LINE = "# The resolved configuration of this job: `trainer train` writes it at each start."
"""How a file that the trainer has written begins."""

_REQUIRED_TABLES = ("job", "model")
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


def load_config(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the configuration of a file with the command line's `--section.key value` on top.

    Relative paths of the file are relative to its directory, those of the command line to the present one;
    `~` and `$NAME` are expanded.

    Raises:
        ConfigError: The file cannot be read or is not TOML; else everything that is wrong with it, in one error.
        UsageError: The overrides are not `--section.key value`.
    """
    config, problems = validated([file_layer(path), command_layer(overrides)])
    if config is None or problems:
        raise error_of(problems)
    return with_source(config, path)


def file_layer(path: str) -> Layer:
    """Return what a file says.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    return Layer(read_table(path), path, os.path.dirname(os.path.abspath(path)))


def command_layer(overrides: Sequence[str]) -> Layer:
    """Return what the command line says.

    Raises:
        UsageError: It is not `--section.key value`.
    """
    return Layer(parse_overrides(overrides), COMMAND_LINE, os.getcwd())


def read_table(path: str) -> dict[str, Any]:
    """Return a file's table; of one that the trainer wrote, without what it derived itself.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", path=path) from error
    if text.startswith(FIRST_LINE):
        _forget_derived(table)
    return table


def validated(layers: Sequence[Layer]) -> tuple[JobConfig | None, list[Problem]]:
    """Return the configuration that layers make, None if there is none, and all that is wrong with it."""
    problems = [problem for layer in layers for problem in _unset_variables(layer)]
    table: dict[str, Any] = {name: {} for name in _REQUIRED_TABLES}
    for layer in layers:
        table = merged(table, _with_places(layer))
    try:
        config = JobConfig.model_validate(table)
    except ValidationError as error:
        return None, [*problems, *_schema_problems(error, layers)]
    found = [replace(problem, where=_where(problem.key, layers)) for problem in checks.check(config)]
    return config, [*problems, *found]


def with_source(config: JobConfig, path: str) -> JobConfig:
    """Return the configuration with the file that it came from."""
    return config.model_copy(update={"job": config.job.model_copy(update={"source": os.path.abspath(path)})})


def _forget_derived(table: dict[str, Any]) -> None:
    # `daemon.keep_full` stands there for `syncd watch`; it must not hide a change of the key that it is from.
    daemon, trainer = table.get("daemon"), table.get("trainer")
    if isinstance(daemon, dict) and isinstance(trainer, dict):
        keep = trainer.get("max_checkpoints_to_keep", 0)
        if daemon.get("keep_full") == keep:
            del daemon["keep_full"]


def _schema_problems(error: ValidationError, layers: Sequence[Layer]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path = detail["loc"]
        key = owner(path)
        whole = ".".join(str(part) for part in path)
        if detail["type"] == "extra_forbidden":
            near = nearest(whole)
            problem = Problem(whole, f"unknown key {whole}", f"did you mean {near}?" if near else None)
        elif detail["type"] == "missing" and whole == key:
            problem = Problem(key, f"{key} is missing")
        else:
            problem = Problem(key, f"{key} = {shown(_given(key, layers))} is not {expected(key)}")
        found.setdefault(problem.key, replace(problem, where=_where(problem.key, layers)))
    return list(found.values())


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


def _with_places(layer: Layer) -> dict[str, Any]:
    """Return a layer's table with its paths made absolute; the empty one and what is no text are left alone."""
    table: dict[str, Any] = dict(layer.table)
    for key in PATHS:
        if _has(table, key) and isinstance(path := _get(table, key), str) and path:
            section, _, name = key.partition(".")
            table[section] = {**table[section], name: _place(path, layer.directory)}
    return table


def _place(path: str, directory: str) -> str:
    expanded = os.path.expandvars(os.path.expanduser(path))
    return os.path.normpath(os.path.join(directory, expanded))


def _unset_variables(layer: Layer) -> list[Problem]:
    found = []
    for key in PATHS:
        path = _get(layer.table, key) if _has(layer.table, key) else None
        if isinstance(path, str) and (left := _VARIABLE.search(os.path.expandvars(path))):
            text = f"{key} = {shown(path)} names {left[0]}, which is not set"
            found.append(Problem(key, text, where=layer.where))
    return found
