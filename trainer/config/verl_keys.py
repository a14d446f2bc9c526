"""What of the job's file verl cannot do or does not read, without importing verl."""

from collections.abc import Iterator, Mapping

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, nearest
from syncd.jobfile.trainer_sections import AlgorithmSection
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
    REWARD_KL_TYPES,
    SFT,
    clip_bounds,
    estimator_and_loss,
    loss_names,
    unread,
    with_published,
)
from trainer.config.attention import attention_problems
from trainer.config.critic import algorithm_of
from trainer.config.lora import lora_problems
from trainer.config.options import algorithm_problems, engine_problems
from trainer.config.strategies import strategy_names, strategy_of

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


def verl_problems(config: JobFile) -> Iterator[Problem]:
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
