"""An adapter and the model that it belongs to as one model's weights, merged in float32, one tensor at a time."""

import os
import re
from collections.abc import Mapping

import torch

from syncd.errors import ConfigError, CorruptDataError
from syncd.protocol.adapter_base import AdapterBase, model_digest
from syncd.protocol.disk import Disk
from trainer.config.lora import AdapterConfig
from trainer.export.weights import ModelWeights, TensorKind

_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
"""A tensor of an adapter: by peft's name in a file, or by its name in a model in training."""

Parts = Mapping[str, str]


class MergedWeights:
    """The weights of a base, each with what an adapter adds to it: float32 if `wide`, else of the base's dtype."""

    def __init__(
        self, base: ModelWeights, adapter: ModelWeights, config: AdapterConfig, *, wide: bool
    ) -> None:
        self._base, self._adapter, self._scaling = base, adapter, config.scaling
        self._parts = _parts_of(adapter)
        self.kinds = dict(base.kinds)
        for name, parts in self._parts.items():
            self._require_fit(name, parts)
            if wide:
                self.kinds[name] = TensorKind(torch.float32, self.kinds[name].shape)

    def read(self, name: str) -> torch.Tensor:
        weight, parts = self._base.read(name), self._parts.get(name)
        if parts is None:
            return weight
        down, up = (self._adapter.read(parts[part]).float() for part in "AB")
        return (weight.float() + (up @ down) * self._scaling).to(self.kinds[name].dtype)

    def _require_fit(self, name: str, parts: Parts) -> None:
        if parts.keys() != {"A", "B"}:
            raise CorruptDataError(f"the adapter of {name} lacks A or B")
        if name not in self.kinds:
            raise CorruptDataError(f"the base has no tensor {name!r}, which the adapter changes")
        (rank, width), (height, other) = (self._adapter.kinds[parts[part]].shape for part in "AB")
        if rank != other or self.kinds[name].shape != (height, width):
            shape = list(self.kinds[name].shape)
            raise CorruptDataError(f"the adapter of {name} adds {[height, width]} to {shape}")


def _parts_of(adapter: ModelWeights) -> dict[str, dict[str, str]]:
    """Return the names of A and B in the adapter by the name of the weight that they change."""
    parts: dict[str, dict[str, str]] = {}
    for name in adapter.kinds:
        part = _PART.fullmatch(name)
        if part is None:
            raise CorruptDataError(f"tensor {name!r} of the adapter is neither A nor B of a linear layer")
        parts.setdefault(f"{part[1]}.weight", {})[part[2]] = name
    return parts


def find_base_directory(
    disk: Disk, recorded: AdapterBase | None, config: AdapterConfig, named: str | None
) -> str:
    """Return the directory of an adapter's base: the one that is named, else the one that its writer had.

    It must be the model that the manifest has `recorded`, any where that is None.
    """
    path = named or (recorded.model if recorded else config.base)
    hint = "--base DIR names the directory of the model that the adapter belongs to"
    if not os.path.isdir(path):
        raise ConfigError("the model that the adapter belongs to does not exist", path=path, hint=hint)
    if recorded is not None and (digest := model_digest(disk, path)) != recorded.digest:
        text = f"the adapter belongs to another model ({recorded.digest}) than this one ({digest})"
        raise ConfigError(text, path=path, hint=hint)
    return path
