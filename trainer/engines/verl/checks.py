"""Checks the configuration before verl is imported, which takes long."""

import importlib.util

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import error_of
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.config.algorithms import SFT, estimator_and_loss, with_published
from trainer.config.attention import FLASH, degree_of, require_groups
from trainer.config.critic import critic_problems
from trainer.config.load import LOADER
from trainer.config.lora import check_start_adapter
from trainer.config.model_files import check_configs
from trainer.config.schedule import optimizer_problems
from trainer.config.strategies import Strategy, strategy_of
from trainer.config.verl_keys import verl_problems
from trainer.engines.verl.release import release_problems


def check(config: JobFile, device: str, ranks: int = 1) -> None:
    """Refuse a configuration, from a file or not, that verl cannot run on a device, `cpu` or `cuda`."""
    problems = [*verl_problems(config), *optimizer_problems(config), *critic_problems(config)]
    if problems := problems or list(release_problems(config)):
        raise error_of(problems, LOADER.hint)
    if device == "cpu":
        _refuse_on_processors(config)
    if (strategy := strategy_of(config)) is not None:
        _check_packages(config.engine.strategy, strategy)
    require_groups(config, ranks)
    check_configs(config)
    check_start_adapter(config.model.lora)


def _refuse_on_processors(config: JobFile) -> None:
    strategy, attention = config.engine.strategy, config.model.attn_implementation
    if strategy != "fsdp2":
        raise ConfigError(f"{strategy} does not run on processors", hint='engine.strategy = "fsdp2"')
    if attention in FLASH:
        least = ", and leave engine.options.ulysses_sequence_parallel_size out" * (degree_of(config) > 1)
        hint = f'model.attn_implementation = "sdpa"{least}'
        raise ConfigError(f"{attention} does not run on processors", hint=hint)


def _check_packages(name: str, strategy: Strategy) -> None:
    for package, command in strategy.packages.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'engine.strategy = "{name}" needs the package {package}', hint=command)


def resolve(section: AlgorithmSection) -> AlgorithmSection:
    """Return the table `algorithm` with the estimator and loss of its name, unless the file gives others."""
    if section.name == SFT:
        return section
    advantage, loss = estimator_and_loss(section)
    return with_published(section.model_copy(update={"advantage": advantage, "loss": loss}))
