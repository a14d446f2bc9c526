"""Checks what the engine `tinker` cannot do, and reads its options. No torch, no SDK."""

from collections.abc import Iterator, Mapping
from typing import Any

from syncd.client.sync_policy import SyncMethod
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.sections import Section
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.parts.tinker.options import TinkerOptions
from trainer.config.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    GAE,
    LACKING,
    SFT,
    estimator_and_loss,
    unread,
)

UNCLIPPED = "importance_sampling"  # the policy loss without bounds of the ratio

TINKER_LOSSES: Mapping[str, str] = {"vanilla": "ppo", "cispo": "cispo", UNCLIPPED: UNCLIPPED}
"""The policy losses of `algorithm.loss` with their names on a tinker server."""


_MEANINGLESS: Mapping[str, tuple[str, ...]] = {
    "engine": (
        "strategy",
        "micro_batch_size",
        "infer_micro_batch_size",
        "packing",
        "offload_params",
        "offload_optimizer",
    ),
    "model": ("dtype", "attn_implementation", "gradient_checkpointing"),
}
"""Keys that the server decides: they stay as they are by default."""

_ONE_MODEL = "a tinker server keeps no second model"
_LACKING_KEYS: Mapping[str, tuple[str, str]] = {
    "kl_coef": (_ONE_MODEL, "kl_coef = 0"),
    "reward_kl_coef": (_ONE_MODEL, "reward_kl_coef = 0"),
    "entropy_coeff": ("no loss of a tinker server has an entropy bonus", "entropy_coeff = 0"),
    "temperature": ("a tinker server computes log-probs at temperature 1", "temperature = 1.0"),
    "teacher_coef": ("it was not tried with a tinker server", "teacher_coef = 0"),
    "loss_options": ("its losses take no arguments of their own", "leave it out"),
    "options": ("its losses take the bounds of the ratio alone", "leave it out"),
}
"""Keys of [algorithm] that no such server can do anything with, with the reason, and what to write."""


def tinker_problems(config: JobFile) -> Iterator[Problem]:
    yield from _algorithm_problems(config)
    for table, names in _MEANINGLESS.items():
        section = getattr(config, table)
        for name in names:
            if getattr(section, name) != _default(section, name):
                yield _problem(f"{table}.{name}", "the server decides that", "leave it out")
    if config.model.lora.rank:
        hint = 'engine.options.rank, and engine.options.publish = "lora" for adapters as steps'
        yield _problem("model.lora", "the server trains an adapter in any case", hint)
    if config.sync.method != SyncMethod.CHECKPOINT.value:
        why = "the weights are on the server, so there is nothing to broadcast or to keep in memory"
        yield _problem("sync.method", why, 'method = "checkpoint"')
    if config.sync.delta == "on":
        text = (
            'sync.delta = "on" has no effect with engine.name = "tinker": its steps are addresses or adapters'
        )
        yield Problem("sync.delta", text, 'sync.delta = "auto"')
    if config.trainer.nproc not in ("auto", 1):
        yield _problem("trainer.nproc", "one process talks to the server", "nproc = 1")
    if config.trainer.save_hf_checkpoint == "always":
        yield _problem(
            "trainer.save_hf_checkpoint", "a step has no base weights", 'save_hf_checkpoint = "never"'
        )


def options_of(config: JobFile) -> TinkerOptions:
    """Return `engine.options`, which the loader has checked."""
    return TinkerOptions.model_validate(config.engine.options)


def _algorithm_problems(config: JobFile) -> Iterator[Problem]:
    section = config.algorithm
    advantage, loss = estimator_and_loss(section)
    if section.name not in ALGORITHMS:
        names = ", ".join(sorted(ALGORITHMS))
        yield Problem("algorithm.name", f'algorithm.name = "{section.name}" is not one of {names}')
    elif section.name != SFT:
        yield from _policy_problems(advantage, loss, section.loss_agg_mode)
        yield from _unread_problems(section, loss)
    for name, (why, hint) in _LACKING_KEYS.items():
        if getattr(section, name) != _default(section, name):
            yield _problem(f"algorithm.{name}", why, hint)
    if section.name != SFT and config.data.sft_ratio > 0:
        why = "the server divides by all rows of an update, so examples cannot be weighed apart from rollouts"
        yield _problem("data.sft_ratio", why, "sft_ratio = 0")


def _policy_problems(advantage: str, loss: str, mode: str) -> Iterator[Problem]:
    if loss not in TINKER_LOSSES:
        hint = f"one of {', '.join(sorted(TINKER_LOSSES))}"
        yield Problem("algorithm.loss", f'a tinker server has no loss "{loss}"', hint)
    if advantage not in ADVANTAGES:
        lacking = {GAE: "a tinker server trains no critic", **LACKING}
        why = f" is not supported: {lacking[advantage]}" if advantage in lacking else " is unknown"
        hint = f"one of {', '.join(sorted(ADVANTAGES))}"
        yield Problem("algorithm.advantage", f'algorithm.advantage = "{advantage}"{why}', hint)
    if mode and mode not in AGGREGATIONS:
        names = ", ".join(sorted(AGGREGATIONS))
        yield Problem("algorithm.loss_agg_mode", f'algorithm.loss_agg_mode = "{mode}" is not one of {names}')


def _unread_problems(section: AlgorithmSection, loss: str) -> Iterator[Problem]:
    clips = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    for name in clips if loss == UNCLIPPED else unread(section):
        if getattr(section, name) != _default(section, name):
            key = f"algorithm.{name}"
            yield Problem(key, f"{key} has no effect with this algorithm", "leave it out")


def _default(section: Section, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _problem(key: str, why: str, hint: str | None = None) -> Problem:
    return Problem(key, f"{key} is not supported by the engine tinker: {why}", hint)
