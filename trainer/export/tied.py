"""Weights that the model takes from another tensor, left out where they only repeat it.

The ranks' files may hold both. transformers ties them again when one is missing, and leaves them apart when both
are there.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from trainer.export.weights import Weights


class Without:
    """Weights, but some names left out."""

    def __init__(self, weights: Weights, names: set[str]) -> None:
        self._weights = weights
        self.kinds = {name: kind for name, kind in weights.kinds.items() if name not in names}

    def read(self, name: str) -> torch.Tensor:
        """Return one whole tensor."""
        return self._weights.read(name)


def without_tied(weights: Weights, directory: str) -> Weights:
    """Return the weights without those that repeat another one to which their model ties them.

    Args:
        weights: All weights.
        directory: Where the model's config.json is. A model that transformers cannot make without code of its
            own ties nothing here.
    """
    there = [pair for pair in _ties(directory) if weights.kinds.keys() >= set(pair)]
    again = {alias for name, alias in there if torch.equal(weights.read(name), weights.read(alias))}
    return Without(weights, again) if again else weights


def _ties(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the first name of each parameter that has several, with each other name."""
    try:
        model = _without_weights(directory)
    except Exception:  # noqa: BLE001 - whatever a config of unknown origin makes of transformers
        return
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            yield first[id(parameter)], name


def _without_weights(directory: str) -> torch.nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        model = named(config) if named else transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(model, torch.nn.Module)
    return model
