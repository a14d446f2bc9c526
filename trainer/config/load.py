"""From a file and the command line to a configuration, or to one error that says all that is wrong."""

import os
from collections.abc import Sequence
from typing import Any, cast

from syncd.jobfile import layers as jobfile
from syncd.jobfile.layers import Layer, layer_of, placed, read_toml
from syncd.jobfile.problems import Problem, error_of
from trainer.config import checks
from trainer.config.algorithms import SFT, VERL, unread, with_published
from trainer.config.keys import KEYS
from trainer.config.model import JobConfig

FIRST_LINE = "# The resolved configuration of this job: `trainer train` writes it at each start."
"""How a file that the trainer has written begins."""

HINT = "trainer config docs"
"""What to run where several things are wrong."""

_FORMER_DEFAULTS = {"clip_ratio": 0.2, "loss_agg_mode": "token-mean", "norm_advantage": True}
"""What earlier releases wrote of [algorithm] for sft, which reads none of it."""

_REQUIRED_TABLES = ("job", "model")


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
        raise error_of(problems, HINT)
    return with_source(config, path)


def file_layer(path: str) -> Layer:
    """Return what a file says.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    return layer_of(read_table(path), path)


def command_layer(overrides: Sequence[str]) -> Layer:
    """Return what the command line says.

    Raises:
        UsageError: It is not `--section.key value`.
    """
    return jobfile.command_layer(overrides, KEYS)


def read_table(path: str) -> dict[str, Any]:
    """Return a file's table; of one that the trainer wrote, without what it derived itself.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    table, text = read_toml(path)
    if text.startswith(FIRST_LINE):
        _forget_derived(table)
        _forget_unread(table)
    return table


def validated(layers: Sequence[Layer]) -> tuple[JobConfig | None, list[Problem]]:
    """Return the configuration that layers make, None if there is none, and all that is wrong with it."""
    made, problems = jobfile.validated(KEYS, layers, _REQUIRED_TABLES)
    config = cast("JobConfig | None", made)
    if config is None:
        return None, problems
    found = placed(checks.check(config), layers)
    resolved = config.model_copy(update={"algorithm": with_published(config.algorithm)})
    return resolved, [*problems, *found]


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


def _forget_unread(table: dict[str, Any]) -> None:
    # Earlier releases wrote values for keys that the algorithm never read; a user who gives them is refused.
    section, engine = table.get("algorithm"), table.get("engine", {})
    if not isinstance(section, dict) or engine.get("name", VERL) != VERL:
        return
    name, *others = (section.get(key, "") for key in ("name", "advantage", "loss"))
    former = [key for key, value in _FORMER_DEFAULTS.items() if section.get(key) == value]
    for key in (*former, "options") if name == SFT else unread(name or "grpo", *others):
        section.pop(key, None)
