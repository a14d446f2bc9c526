"""Reads whole tensors by name, one at a time, and leaves out those that only repeat a tied one."""

import errno
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from syncd.errors import CorruptDataError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.disk import Disk
from syncd.registered import registered
from syncd.transports.torch_tensors import TO_TORCH

SPLIT_WEIGHTS = "trainer.split_weights"
"""The group of entry points of what reads distributed checkpoints of other frameworks."""


class TensorKind(NamedTuple):
    """What a tensor is, known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ModelWeights(Protocol):
    kinds: dict[str, TensorKind]

    def read(self, name: str) -> torch.Tensor:
        """Return one whole tensor in main memory, which is all the memory that it takes."""


def split_weights(disk: Disk, directory: str, config: str) -> ModelWeights | None:
    """Return a distributed checkpoint's weights as a part reads them, else None; `config` is config.json's path."""
    openers: list[Callable[[Disk, str, str], ModelWeights | None]]
    openers = [point.load() for point in registered(SPLIT_WEIGHTS).values()]
    return next(
        (weights for opener in openers if (weights := opener(disk, directory, config)) is not None), None
    )


class SafetensorsFiles:
    """Weights in safetensors files, mapped into memory."""

    def __init__(self, disk: Disk, paths: Iterable[str]) -> None:
        self.kinds: dict[str, TensorKind] = {}
        self._paths: dict[str, str] = {}
        for path in paths:
            for tensor in read_weights_header(disk, path).tensors.values():
                if tensor.name in self.kinds:
                    raise CorruptDataError(f"tensor {tensor.name!r} is in two files", path=path)
                if tensor.dtype not in TO_TORCH:
                    raise CorruptDataError(f"tensor {tensor.name!r} is {tensor.dtype}", path=path)
                self.kinds[tensor.name] = TensorKind(TO_TORCH[tensor.dtype], tensor.shape)
                self._paths[tensor.name] = path

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; its pages stay those of the file."""
        path = self._paths[name]
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except SafetensorError as error:
            raise CorruptDataError(f"tensor {name!r} cannot be read: {error}", path=path) from error
        assert isinstance(tensor, torch.Tensor)
        return tensor


def leave_out_tied(weights: ModelWeights, directory: str) -> None:
    """Remove the weights that repeat another one to which the model's config.json in `directory` ties them.

    A model that transformers cannot make without code of its own ties nothing here.
    """
    there = [pair for pair in _ties(directory) if weights.kinds.keys() >= set(pair)]
    for alias in {alias for name, alias in there if torch.equal(weights.read(name), weights.read(alias))}:
        del weights.kinds[alias]


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
