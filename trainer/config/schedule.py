"""The learning rates of a run: when they end, and what is wrong with them. No torch here."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.trainer_sections import OptimizerSection
from trainer.config.critic import critic_epochs, critic_mini_batches

CONSTANT, COSINE = "constant", "cosine"


def schedule_steps(config: JobFile) -> int:
    """Return the updates after which the learning rate's schedule ends, -1 if it has no end."""
    return _end(config.algorithm.optimizer, _updates(config))


def critic_schedule_steps(config: JobFile) -> int:
    return _end(config.critic.optimizer, _critic_updates(config))


def optimizer_problems(config: JobFile) -> Iterator[Problem]:
    yield from _problems("algorithm.optimizer", config.algorithm.optimizer, _updates(config))
    if not config.critic.enabled:
        return
    yield from _problems("critic.optimizer", config.critic.optimizer, _critic_updates(config))
    alone, total = config.critic.warmup_steps, config.trainer.total_steps
    if total is not None and alone >= total:
        key = "critic.warmup_steps"
        text = f"{key} = {alone} leaves nothing of trainer.total_steps = {total} to the policy"
        yield Problem(key, text, f"{key} = {total // 10}")


def _updates(config: JobFile) -> int | None:
    total, algorithm = config.trainer.total_steps, config.algorithm
    return None if total is None else total * algorithm.epochs * algorithm.mini_batches


def _critic_updates(config: JobFile) -> int | None:
    total = config.trainer.total_steps
    return None if total is None else total * critic_epochs(config) * critic_mini_batches(config)


def _end(optimizer: OptimizerSection, updates: int | None) -> int:
    return -1 if optimizer.schedule == CONSTANT else optimizer.schedule_steps or updates or 0


def _problems(key: str, optimizer: OptimizerSection, updates: int | None) -> Iterator[Problem]:
    name, warmup, end = optimizer.schedule, optimizer.warmup_steps, _end(optimizer, updates)
    if end == 0:
        hint = f"set {key}.schedule_steps or trainer.total_steps"
        yield Problem(f"{key}.schedule", f'{key}.schedule = "{name}" has no end', hint)
    elif 0 < end <= warmup:
        of = f"{key}.schedule_steps = {end}" if optimizer.schedule_steps else f"the {end} updates of the run"
        yield _too_long(key, warmup, f"leaves nothing of {of}")
    elif updates is not None and warmup > updates:
        yield _too_long(key, warmup, f"is longer than the run, which has {updates} updates")
    if optimizer.min_lr_ratio and name != COSINE:
        text = f'{key}.min_lr_ratio has no effect with {key}.schedule = "{name}"'
        yield Problem(f"{key}.min_lr_ratio", text, f'{key}.schedule = "{COSINE}", or leave it out')


def _too_long(key: str, warmup: int, why: str) -> Problem:
    return Problem(f"{key}.warmup_steps", f"{key}.warmup_steps = {warmup} {why}", f"{key}.warmup_steps = 0")
