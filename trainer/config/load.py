"""Reads the job's file as the trainer needs it, and checks what no single key shows."""

from collections.abc import Iterator, Sequence
from typing import Any

from syncd.jobfile.evaluation import PREFIX, produced_by
from syncd.jobfile.loader import Layer, Loader, TomlFile, read_toml
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, nearest
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.protocol.layout import is_identity
from syncd.protocol.permissions import policy_problem
from syncd.registered import registered
from trainer.config.algorithms import (
    OF_GROUPS,
    SFT,
    VERL,
    estimator_and_loss,
    unread,
    with_published,
)
from trainer.config.critic import algorithm_of, critic_problems
from trainer.config.known_figures import metric_problems
from trainer.config.schedule import optimizer_problems
from trainer.config.verl_keys import verl_problems
from trainer.plugins import SAMPLE_STRATEGY, unknown_name

FIRST_LINE = "# The resolved configuration of this job: `trainer train` writes it at each start."
"""How a file that the trainer has written begins."""

ENGINE_CHECKS = "trainer.engine_checks"
"""The group of entry points of what checks the job's file for an engine of a part, by `engine.name`. No torch."""

_FORMER_DEFAULTS = {"clip_ratio": 0.2, "loss_agg_mode": "token-mean", "norm_advantage": True}
"""What earlier releases wrote of [algorithm] for sft, which reads none of it."""


def load_config(path: str, overrides: Sequence[str] = (), *, trust: bool = False) -> JobFile:
    """Return the configuration of a file with the command line's `--section.key value` on top.

    Relative paths of the file are relative to its directory, those of the command line to the current one;
    `~` and `$NAME` are expanded. With `trust`, code that the file names runs whoever could have written it.
    """
    layers = [file_layer(path), LOADER.command_layer(overrides)]
    return resolved(LOADER.load(layers, path, trust=trust))


def resolved(config: JobFile) -> JobFile:
    """Return the configuration with the values of the algorithm's publication where the user gives none."""
    return config.model_copy(update={"algorithm": with_published(algorithm_of(config))})


def file_layer(path: str) -> Layer:
    return _read(path).layer()


def read_table(path: str) -> dict[str, Any]:
    """Return a file's table; if the trainer wrote the file, without the values that it derived."""
    return _read(path).table


def _read(path: str) -> TomlFile:
    file = read_toml(path)
    if file.text.startswith(FIRST_LINE):
        _forget_derived(file.table)
        _forget_unread(file.table)
    return file


def _forget_derived(table: dict[str, Any]) -> None:
    # The trainer writes `daemon.keep_full` for `syncd watch`; it must not hide a change of its origin.
    daemon, trainer = table.get("daemon"), table.get("trainer")
    if isinstance(daemon, dict) and isinstance(trainer, dict):
        keep = trainer.get("max_checkpoints_to_keep", 0)
        if daemon.get("keep_full") == keep:
            del daemon["keep_full"]


def _forget_unread(table: dict[str, Any]) -> None:
    # Earlier releases wrote values for keys that the algorithm does not read, which a user may not give.
    section, engine = table.get("algorithm"), table.get("engine", {})
    if not isinstance(section, dict) or not isinstance(engine, dict) or engine.get("name", VERL) != VERL:
        return
    chosen = {key: section[key] for key in ("name", "advantage", "loss") if section.get(key)}
    if not all(isinstance(name, str) for name in chosen.values()):
        return  # the check of the file refuses it
    former = [key for key, value in _FORMER_DEFAULTS.items() if section.get(key) == value]
    is_sft = chosen.get("name") == SFT
    for key in (*former, "options") if is_sft else unread(AlgorithmSection.model_construct(**chosen)):
        section.pop(key, None)


def check(config: JobFile) -> Iterator[Problem]:
    yield from _names(config)
    yield from _plugins(config)
    yield from _data(config)
    yield from optimizer_problems(config)
    yield from critic_problems(config)
    if config.engine.name == VERL:
        yield from verl_problems(config)
    elif (point := registered(ENGINE_CHECKS).get(config.engine.name)) is not None:
        yield from point.load()(config)
    yield from _sync(config)


def _names(config: JobFile) -> Iterator[Problem]:
    for key, value in (("job.dir", config.job.dir), ("model.path", config.model.path)):
        if not value:
            yield Problem(key, f"{key} is empty", "name a directory; is a shell variable unset?")
    if problem := policy_problem(config.job.permissions, config.job.group):
        yield Problem("job.permissions", f"job.{problem}", 'permissions = "group" and group = "NAME"')
    if not is_identity(config.trainer.name):
        yield Problem(
            "trainer.name",
            f"trainer.name = {config.trainer.name!r} cannot be a file name",
            "letters, digits, '.', '_' and '-', at most 100, and no '.' or '-' first",
        )


def _plugins(config: JobFile) -> Iterator[Problem]:
    name = config.data.strategy
    if name and name not in SAMPLE_STRATEGY.installed:
        error = unknown_name(f'data.strategy = "{name}" is not installed', name, SAMPLE_STRATEGY.installed)
        yield Problem("data.strategy", error.message, error.hint)
    if config.data.strategy_options and not name:
        text = "data.strategy_options has no effect without data.strategy"
        yield Problem("data.strategy_options", text, "leave it out")


def _data(config: JobFile) -> Iterator[Problem]:
    data, rows = config.data, config.data.groups * config.data.group_size
    if config.algorithm.name == SFT and not data.sft_path:
        yield Problem("data.sft_path", 'algorithm.name = "sft" needs data.sft_path')
    elif data.sft_ratio > 0 and not data.sft_path:
        yield Problem("data.sft_path", f"data.sft_ratio = {data.sft_ratio:g} needs data.sft_path")
    if rows % config.algorithm.mini_batches:
        yield Problem(
            "algorithm.mini_batches",
            f"data.groups x data.group_size = {rows} rows cannot be split evenly into"
            f" algorithm.mini_batches = {config.algorithm.mini_batches}",
        )
    if data.max_waiting < rows:
        yield Problem(
            "data.max_waiting",
            f"data.max_waiting = {data.max_waiting} is less than the {rows} rows of one step"
            " (data.groups x data.group_size)",
        )
    if config.trainer.validation_interval and not data.validation_path:
        text = "trainer.validation_interval has no effect without data.validation_path"
        yield Problem("trainer.validation_interval", text)
    yield from _selection(config)
    advantage = estimator_and_loss(algorithm_of(config))[0]
    if data.group_size == 1 and advantage in OF_GROUPS:
        text = f"data.group_size = 1 leaves {advantage} nothing to compare a rollout with"
        yield Problem(
            "data.group_size", text, 'data.group_size = 8, or algorithm.name = "reinforce_plus_plus"'
        )
    if data.beyond == "weight" and data.max_age is None:
        yield Problem("data.max_age", 'data.beyond = "weight" needs data.max_age')


def _selection(config: JobFile) -> Iterator[Problem]:
    section = config.selection
    if section.patience and not section.metric:
        yield Problem(
            "selection.patience", "selection.patience needs selection.metric", 'metric = "eval/reward"'
        )
    if section.metric.startswith("validation/") and not config.data.validation_path:
        text = f'selection.metric = "{section.metric}" needs data.validation_path'
        yield Problem("selection.metric", text, "data.validation_path = FILE")
    else:
        yield from metric_problems(config)
    produced = produced_by(config.explorer)
    if section.metric.startswith(PREFIX) and produced is not None and section.metric not in produced:
        text = f'selection.metric = "{section.metric}" is a figure of no set of [explorer.evaluation]'
        hint = (
            nearest(section.metric, produced) or "explorer.evaluation.tasks, or explorer.evaluation.sets.NAME"
        )
        yield Problem("selection.metric", text, hint)


def _sync(config: JobFile) -> Iterator[Problem]:
    """Yield what is wrong with `delta = "on"` where no step could be a delta."""
    key = "sync.delta"
    if config.sync.delta == "on" and config.sync.mode == "stream":
        text = f'{key} = "on" has no effect with sync.mode = "stream", which keeps no weights to compare with'
        yield Problem(key, text, 'sync.mode = "background", or sync.delta = "auto"')
    if config.sync.delta == "on" and config.model.publishes_adapters:
        text = f'{key} = "on" has no effect with steps that are adapters'
        yield Problem(key, text, 'model.lora.publish = "merged", or sync.delta = "auto"')


LOADER = Loader(
    tables=("job", "model", "critic", "data", "sync"),
    required=("job", "model"),
    check=check,
    hint="trainer config docs",
)
