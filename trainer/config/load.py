"""Reads the job's file as the trainer needs it, and checks what no single key shows."""

from collections.abc import Iterator, Mapping, Sequence
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
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    GAE,
    KL_TYPES,
    LACKING,
    LACKING_ALGORITHMS,
    LACKING_LOSSES,
    LOSSES,
    OF_GAE,
    OF_GROUPS,
    REWARD_KL_TYPES,
    SFT,
    VERL,
    clip_bounds,
    estimator_and_loss,
    loss_names,
    unread,
    with_published,
)
from trainer.config.attention import attention_problems
from trainer.config.critic import algorithm_of, critic_problems
from trainer.config.known_figures import metric_problems
from trainer.config.lora import lora_problems
from trainer.config.options import algorithm_problems, engine_problems
from trainer.config.schedule import optimizer_problems
from trainer.config.strategies import strategy_names, strategy_of
from trainer.config.sync import sync_problems
from trainer.plugins import SAMPLE_STRATEGY, unknown_name

FIRST_LINE = "# The resolved configuration of this job: `trainer train` writes it at each start."
"""How a file that the trainer has written begins."""

ENGINE_CHECKS = "trainer.engine_checks"
"""The group of entry points of what checks the job's file for an engine of a part, by `engine.name`. No torch."""

_FORMER_DEFAULTS = {"clip_ratio": 0.2, "loss_agg_mode": "token-mean", "norm_advantage": True}
"""What earlier releases wrote of [algorithm] for sft, which reads none of it."""

_OF_ESTIMATORS = frozenset({"norm_advantage", "turn_rewards", *OF_GAE})
_INSTEAD_OF_PAIRS = (
    'train the preferred responses with algorithm.name = "sft",'
    ' or score responses with explorer.reward.function and train with "grpo"'
)
_INSTEAD_OF_REWARD_MODEL = (
    "train it elsewhere, serve it, and call it from explorer.reward.function = package.module:function"
)
_CLIPPED_BELOW = frozenset({"vanilla", "gspo"})
"""Losses for which a lower bound of 0 or less would be a mistake; cispo, for one, is used with such a bound."""


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
    if not isinstance(section, dict) or engine.get("name", VERL) != VERL:
        return
    chosen = {key: section[key] for key in ("name", "advantage", "loss") if section.get(key)}
    former = [key for key, value in _FORMER_DEFAULTS.items() if section.get(key) == value]
    is_sft = chosen.get("name") == SFT
    for key in (*former, "options") if is_sft else unread(AlgorithmSection.model_construct(**chosen)):
        section.pop(key, None)


def check(config: JobFile) -> Iterator[Problem]:
    """Yield the problems that no single key shows: keys that do not go together."""
    yield from _names(config)
    yield from _plugins(config)
    yield from _data(config)
    yield from optimizer_problems(config)
    yield from critic_problems(config)
    if config.engine.name == VERL:
        yield from verl_problems(config)
    elif (point := registered(ENGINE_CHECKS).get(config.engine.name)) is not None:
        yield from point.load()(config)
    yield from sync_problems(config)


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


def verl_problems(config: JobFile) -> Iterator[Problem]:
    """Yield what verl cannot do here, without importing verl."""
    section = algorithm_of(config)
    yield from _one_of("engine.strategy", config.engine.strategy, strategy_names())
    if section.loss_agg_mode:
        yield from _one_of("algorithm.loss_agg_mode", section.loss_agg_mode, AGGREGATIONS)
    yield from _one_of("algorithm.kl_type", section.kl_type, KL_TYPES)
    yield from _one_of("algorithm.reward_kl_type", section.reward_kl_type, REWARD_KL_TYPES)
    if section.reward_kl_coef and section.name == SFT:
        key = "algorithm.reward_kl_coef"
        yield Problem(key, f'{key} has no effect with algorithm.name = "{SFT}"', "leave it out")
    yield from _name(section.name)
    yield from _supported("algorithm.loss", section.loss, loss_names(), LACKING_LOSSES)
    yield from _supported("algorithm.advantage", section.advantage, ADVANTAGES | {GAE}, LACKING)
    yield from _pair(config)
    yield from _teacher(section)
    yield from _unread(section)
    yield from algorithm_problems(section)
    strategy = strategy_of(config)
    if strategy is not None:
        yield from strategy.problems(config)
    else:
        yield from engine_problems(config.engine)
        yield from attention_problems(config)
    yield from lora_problems(config)


def _name(name: str) -> Iterator[Problem]:
    why = LACKING_ALGORITHMS.get(name.lower())
    if why is None:
        yield from _one_of("algorithm.name", name, ALGORITHMS)
        return
    text = f'algorithm.name = "{name}" is not supported: {why}'
    yield Problem("algorithm.name", text, _INSTEAD_OF_REWARD_MODEL if "reward" in why else _INSTEAD_OF_PAIRS)


def _teacher(section: AlgorithmSection) -> Iterator[Problem]:
    key = "algorithm.teacher_coef"
    if section.teacher_coef and section.name == SFT:
        yield Problem(key, f'{key} has no effect with algorithm.name = "sft"', "leave it out")
    elif section.teacher_coef and section.temperature != 1:
        text = f"{key} needs algorithm.temperature = 1, at which a teacher gives log-probs"
        yield Problem(key, text, "temperature = 1.0")


def _unread(section: AlgorithmSection) -> Iterator[Problem]:
    advantage, loss = estimator_and_loss(section)
    for name in unread(section):
        field = AlgorithmSection.model_fields[name]
        if getattr(section, name) != field.get_default(call_default_factory=True):
            reader = f"the estimator {advantage}" if name in _OF_ESTIMATORS else f"the loss {loss}"
            yield Problem(
                f"algorithm.{name}", f"algorithm.{name} has no effect with {reader}", "leave it out"
            )


def _pair(config: JobFile) -> Iterator[Problem]:
    section = config.algorithm
    _, loss = estimator_and_loss(section)
    low, _ = clip_bounds(with_published(section)) or (0.0, 0.0)
    if loss in _CLIPPED_BELOW and low >= 1:
        key = "clip_ratio" if section.clip_ratio_low is None else "clip_ratio_low"
        yield Problem(
            f"algorithm.{key}", f"algorithm.{key} = {low:g} clips nothing below: a ratio is never less than 0"
        )
    if section.loss_options and loss in LOSSES:
        text = f"algorithm.loss_options has no effect with the loss {loss}"
        yield Problem("algorithm.loss_options", text, "algorithm.options has what verl's losses read")
    keys = [key for key in ("advantage", "loss", "options", "loss_options") if getattr(section, key)]
    if section.name == SFT and keys:
        key = f"algorithm.{keys[0]}"
        yield Problem(key, f'{key} has no effect with algorithm.name = "sft"')


def _one_of(key: str, value: str, choices: Mapping[str, object] | frozenset[str]) -> Iterator[Problem]:
    if value not in choices:
        text = f'{key} = "{value}" is not one of {", ".join(sorted(choices))}'
        yield Problem(key, text, nearest(value, choices))


def _supported(
    key: str, value: str, choices: frozenset[str], lacking: Mapping[str, str]
) -> Iterator[Problem]:
    if value in lacking:
        hint = f"one of {', '.join(sorted(choices))}"
        yield Problem(key, f'{key} = "{value}" is not supported: {lacking[value]}', hint)
    elif value:
        yield from _one_of(key, value, choices)


LOADER = Loader(
    tables=("job", "model", "critic", "data", "sync"),
    required=("job", "model"),
    check=check,
    hint="trainer config docs",
)
