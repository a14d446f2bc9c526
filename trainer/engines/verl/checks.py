"""Checks the configuration before verl is imported, which takes long."""

from syncd.errors import ConfigError
from syncd.jobfile.problems import error_of
from trainer.config.algorithms import SFT, estimator_and_loss, with_published
from trainer.config.load import LOADER, optimizer_problems, verl_problems
from trainer.config.model import AlgorithmSection, JobConfig
from trainer.config.model_files import read_model_config
from trainer.engines.verl.release import release_problems


def check(config: JobConfig, device: str) -> None:
    """Refuse a configuration that verl cannot run here; one that was not loaded from a file is checked here first.

    Args:
        config: The job's file.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: It names what to write instead.
    """
    problems = [*verl_problems(config), *optimizer_problems(config)]
    if problems := problems or list(release_problems(config)):
        raise error_of(problems, LOADER.hint)
    if device == "cpu" and config.engine.strategy != "fsdp2":
        raise ConfigError(
            f"{config.engine.strategy} does not run on processors", hint='engine.strategy = "fsdp2"'
        )
    read_model_config(config.model.path)


def resolve(section: AlgorithmSection) -> AlgorithmSection:
    """Return the table `algorithm` with the estimator and loss of its name, unless the file gives others."""
    if section.name == SFT:
        return section
    advantage, loss = estimator_and_loss(section)
    return with_published(section.model_copy(update={"advantage": advantage, "loss": loss}))


def schedule_steps(config: JobConfig) -> int:
    """Return the updates after which the learning rate's schedule ends, -1 if it has no end."""
    algorithm, optimizer = config.algorithm, config.algorithm.optimizer
    if optimizer.schedule == "constant":
        return -1
    steps = config.trainer.total_steps or 0
    return optimizer.schedule_steps or steps * algorithm.epochs * algorithm.mini_batches
