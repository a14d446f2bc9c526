"""verl's advantage estimators, on the outcome rewards of a whole batch."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from syncd.errors import ConfigError
from trainer.config.algorithms import ADVANTAGES, LACKING
from trainer.config.model import AlgorithmSection
from trainer.engines.verl.checks import known
from trainer.experience.batch import Batch

_GIVEN = frozenset({"token_level_rewards", "response_mask", "index", "config", "norm_adv_by_std_in_grpo"})
"""What an estimator may ask for. Others want a critic's values, a baseline's rewards, or more of the model."""


def usable() -> list[str]:
    """Return the names of the estimators that need no more than rewards and groups."""
    return sorted(name for name in ADV_ESTIMATOR_REGISTRY if name in ADVANTAGES and not _missing(name))


def check_estimator(name: str) -> None:
    """Refuse an estimator that is not there, or that needs what is not there.

    Raises:
        ConfigError: With those that work.
    """
    names = usable()
    if name not in ADV_ESTIMATOR_REGISTRY:
        hint = known("algorithm.advantage", name, names)
        raise ConfigError(f"no advantage estimator is called {name!r}", hint=hint)
    if name not in names:
        needed = ", ".join(_missing(name)) or LACKING.get(name, "what is not supported").removeprefix(
            "it needs "
        )
        hint = f"algorithm.advantage is one of {', '.join(names)}"
        raise ConfigError(f"{name} needs {needed}, which are not computed", hint=hint)


def advantages(algorithm: AlgorithmSection, batch: Batch) -> list[torch.Tensor]:
    """Return the advantage of each response token, one tensor a row, weighted by the row's weight.

    The reward is at the last token that the model chose; groups must be whole.

    Raises:
        ConfigError: The estimator refuses such groups.
    """
    masks = [torch.tensor(list(row.action_mask), dtype=torch.float32) for row in batch.experiences]
    mask = pad_sequence(masks, batch_first=True)
    normed = bool(algorithm.norm_advantage)
    given: dict[str, Any] = {
        "token_level_rewards": _rewards(batch, mask),
        "response_mask": mask,
        "index": np.array([str(group) for group in batch.groups], dtype=object),
        "norm_adv_by_std_in_grpo": normed,
        "config": AlgoConfig(adv_estimator=algorithm.advantage, norm_adv_by_std_in_grpo=normed),
    }
    found = _call(algorithm.advantage, given) * torch.tensor(batch.weights).unsqueeze(1)
    return [row[: len(own)] for row, own in zip(found, masks, strict=True)]


def _call(name: str, given: dict[str, Any]) -> torch.Tensor:
    estimator = get_adv_estimator_fn(name)
    taken = inspect.signature(estimator).parameters
    try:
        found: torch.Tensor = estimator(**{key: value for key, value in given.items() if key in taken})[0]
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{name} cannot take this batch: {error}", hint="see data.group_size") from error
    return found


def _rewards(batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    rewards = torch.zeros_like(mask)
    for number, row in enumerate(batch.experiences):
        rewards[number, last_action(row.action_mask)] = row.reward
    return rewards


def last_action(mask: Sequence[bool]) -> int:
    """Return the place of the last token that the model chose; the response's last one if it chose none."""
    return next((place for place in reversed(range(len(mask))) if mask[place]), len(mask) - 1)


def _missing(name: str) -> list[str]:
    """Return what an estimator must be given and we have not."""
    parameters = inspect.signature(ADV_ESTIMATOR_REGISTRY[name]).parameters.values()
    needed = [
        one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return [parameter for parameter in needed if parameter not in _GIVEN]
