"""What the table [critic] means together with the others. No torch here."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.trainer_sections import AlgorithmSection, CriticSection
from trainer.config.algorithms import GAE, SFT, VERL, estimator_and_loss

PPO = "ppo"  # the algorithm whose estimator is gae where there is a critic


def algorithm_of(config: JobFile) -> AlgorithmSection:
    """Return the table `algorithm`, in which ppo with a critic has the estimator gae unless the file has another."""
    section = config.algorithm
    if not config.critic.enabled or section.name != PPO or section.advantage:
        return section
    return section.model_copy(update={"advantage": GAE})


def critic_path(config: JobFile) -> str:
    return config.critic.path or config.model.path


def critic_epochs(config: JobFile) -> int:
    return config.critic.epochs or config.algorithm.epochs


def critic_mini_batches(config: JobFile) -> int:
    return config.critic.mini_batches or config.algorithm.mini_batches


def critic_problems(config: JobFile) -> Iterator[Problem]:
    name, (advantage, _) = config.algorithm.name, estimator_and_loss(algorithm_of(config))
    if not config.critic.enabled:
        yield from _without(config, advantage)
    elif config.engine.name != VERL:
        text = f'critic.enabled: the engine "{config.engine.name}" trains no critic'
        yield Problem("critic.enabled", text, f'engine.name = "{VERL}"')
    elif name == SFT:
        hint = "give it in the stage that has a critic"
        yield Problem("critic.enabled", f'critic.enabled has no effect with algorithm.name = "{SFT}"', hint)
    elif advantage != GAE:
        text = f"critic.enabled has no effect with the estimator {advantage}, which reads no values"
        yield Problem("critic.enabled", text, f'algorithm.name = "{PPO}", or algorithm.advantage = "{GAE}"')
    yield from _mini_batches(config)


def _without(config: JobFile, advantage: str) -> Iterator[Problem]:
    """Yield what needs a critic and has none; sft may have keys for other stages."""
    if advantage == GAE and config.engine.name == VERL:
        text = f'algorithm.advantage = "{GAE}" needs a critic'
        yield Problem("algorithm.advantage", text, "critic.enabled = true")
    keys = [key for key, value in CriticSection() if getattr(config.critic, key) != value]
    if keys and config.algorithm.name != SFT:
        key = f"critic.{keys[0]}"
        yield Problem(key, f"{key} has no effect without a critic", "critic.enabled = true, or leave it out")


def _mini_batches(config: JobFile) -> Iterator[Problem]:
    rows, parts = config.data.groups * config.data.group_size, config.critic.mini_batches
    if parts and rows % parts:
        text = f"data.groups x data.group_size = {rows} rows cannot be split evenly into"
        yield Problem("critic.mini_batches", f"{text} critic.mini_batches = {parts}")
