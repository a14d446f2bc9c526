"""Checks the configuration for verl 0.7.1 before verl is imported, which takes long."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, error_of
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.config.algorithms import GAE, LOSSES, SFT, estimator_and_loss
from trainer.config.critic import critic_problems
from trainer.config.load import LOADER
from trainer.config.model_files import read_model_config
from trainer.config.options import CORRECTION
from trainer.config.schedule import optimizer_problems
from trainer.config.verl_keys import verl_problems
from trainer.engines.verl.release import LEGACY, RELEASES, lacking_problems

_OTHER = 'engine.name = "verl" has it'


def check(config: JobFile) -> None:
    installed = version("verl")
    if installed != LEGACY:
        message = f"verl {installed} is installed; the engine verl_legacy runs {LEGACY}"
        raise ConfigError(message, hint=f'engine.name = "verl", or {install_command("verl-legacy")}')
    problems = [*verl_problems(config), *optimizer_problems(config), *critic_problems(config)]
    if problems := problems or list(_problems(config)):
        raise error_of(problems, LOADER.hint)
    _check_rotary(config.model.path)


def _problems(config: JobFile) -> Iterator[Problem]:
    engine, section = config.engine, config.algorithm
    yield from lacking_problems(config, LEGACY, RELEASES["0.8"])  # it lacks as much
    values = {
        "engine.strategy": engine.strategy if engine.strategy != "fsdp2" else None,
        "engine.packing": engine.packing,
        "engine.offload_params": engine.offload_params,
        "engine.offload_optimizer": engine.offload_optimizer,
        "engine.options": engine.options,
        "model.lora.rank": config.model.lora.rank,
        "data.sft_ratio": config.data.sft_ratio if section.name != SFT else None,
        # Their means are of one micro-batch: they would depend on how rows are split.
        "algorithm.entropy_coeff": section.entropy_coeff,
        "algorithm.kl_coef": section.kl_coef,
        "algorithm.reward_kl_coef": section.reward_kl_coef,
        'algorithm.optimizer.schedule = "linear"': section.optimizer.schedule == "linear",
        **_given_options(section),
    }
    for key, value in values.items():
        if value:
            yield Problem(key, f"the engine verl_legacy has no {key}", _OTHER)
    advantage, loss = estimator_and_loss(section)
    if advantage == GAE:
        yield Problem("algorithm.advantage", f'algorithm.advantage = "{GAE}" needs a critic', _OTHER)
    if section.name != SFT and loss not in LOSSES:
        yield Problem("algorithm.loss", f"the engine verl_legacy does not take the loss {loss}", _OTHER)


def _given_options(section: AlgorithmSection) -> dict[str, Any]:
    correction = section.options.get("policy_loss", {}).get("rollout_correction")
    return {
        f"algorithm.options.{CORRECTION}": correction,
        "algorithm.options.calculate_entropy": section.options.get("calculate_entropy"),
    }


def _check_rotary(path: str) -> None:
    """Refuse a model whose `rope_parameters`, as transformers 5 writes them, transformers 4 would ignore silently."""
    document = read_model_config(path)
    table = document.get("rope_parameters")
    if not isinstance(table, dict):
        return
    kind, theta = table.get("rope_type", "default"), table.get("rope_theta")
    if kind == "default" and document.get("rope_theta") == theta:
        return
    hint = f'write "rope_theta": {theta} into its config.json' if kind == "default" else _OTHER
    message = f"transformers 4 does not read rope_parameters ({kind}, rope_theta {theta}) of this model"
    raise ConfigError(message, path=path, hint=hint)
