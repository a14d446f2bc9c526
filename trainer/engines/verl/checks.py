"""Checks the configuration before verl is imported, which takes long."""

import difflib
from collections.abc import Iterable

from syncd.errors import ConfigError
from syncd.jobfile.problems import Problem
from trainer.config.algorithms import ALGORITHMS, SFT, estimator_and_loss, with_published
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.config.model_files import read_model_config

STRATEGIES = ("fsdp2", "fsdp")


def check(config: JobConfig, device: str) -> None:
    """Refuse a configuration that verl cannot run here.

    Args:
        config: The job's file.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: It names what to write instead.
    """
    _check_strategy(config.engine.strategy, device)
    resolve(config.algorithm)
    schedule_steps(config)
    read_model_config(config.model.path)


def resolve(section: AlgorithmSection) -> AlgorithmSection:
    """Return the table `algorithm` with the estimator and loss of its name, unless the file gives others.

    Raises:
        ConfigError: There is no algorithm of this name.
    """
    if section.name == SFT:
        return section
    if section.name not in ALGORITHMS:
        raise ConfigError(
            f"no algorithm is called {section.name!r}",
            hint=known("algorithm.name", section.name, ALGORITHMS),
        )
    advantage, loss = estimator_and_loss(section)
    return with_published(section.model_copy(update={"advantage": advantage, "loss": loss}))


def schedule_steps(config: JobConfig) -> int:
    """Return the updates after which the learning rate's schedule ends, -1 if it has no end.

    Raises:
        ConfigError: A cosine without an end.
    """
    algorithm, optimizer = config.algorithm, config.algorithm.optimizer
    if optimizer.schedule == "constant":
        return -1
    steps = config.trainer.total_steps
    if not optimizer.schedule_steps and steps is None:
        raise ConfigError(
            "a cosine schedule needs an end",
            hint="set algorithm.optimizer.schedule_steps or trainer.total_steps",
        )
    return optimizer.schedule_steps or (steps or 0) * algorithm.epochs * algorithm.mini_batches


def known(key: str, name: str, names: Iterable[str]) -> str:
    """Return a hint: the nearest known name, or all of them."""
    choices = list(names)
    near = difflib.get_close_matches(name, choices, 1)
    return f"did you mean {near[0]}?" if near else f"{key} is one of {', '.join(choices)}"


def refuse_first(problems: Iterable[Problem]) -> None:
    """Raise the first problem, if any.

    Raises:
        ConfigError: The first problem.
    """
    for problem in problems:
        raise ConfigError(problem.text, hint=problem.hint)


def _check_strategy(strategy: str, device: str) -> None:
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"the verl engine has no strategy {strategy!r}",
            hint=known("engine.strategy", strategy, STRATEGIES),
        )
    if device == "cpu" and strategy != "fsdp2":
        raise ConfigError(f"{strategy} does not run on processors", hint='engine.strategy = "fsdp2"')
