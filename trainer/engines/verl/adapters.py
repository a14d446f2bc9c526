"""LoRA on verl's engines: the adapter as peft reads it, the weights with it merged in, and the model without it.

verl's own export is not used. Without arguments it gives the weights that the adapter was put beside, which are not
trained, and its merged export is rounded to bfloat16.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch.distributed.tensor import DTensor, Replicate
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from syncd.errors import ConfigError, CorruptDataError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.documents import encode, read_document
from syncd.protocol.layout import ADAPTER_CONFIG
from syncd.protocol.local_disk import LocalDisk
from trainer.engines.verl.models import Model

_NAME = "default"  # what peft calls the one adapter

_OUTSIDE, _BASE, _OWN = "base_model.model.", ".base_layer.", ".lora_"

_RECORD = "base.json"

Exported = Iterator[tuple[str, torch.Tensor]]


class Adapter:
    def __init__(self, model: Model) -> None:
        self._model = model
        modules = model.module.named_modules()
        self._layers: dict[str, Any] = {
            name: module for name, module in modules if isinstance(module, LoraLayer)
        }
        tied = {name.rpartition(".")[0] for name in model.module.all_tied_weights_keys}
        for name, layer in self._layers.items():
            own = name.removeprefix(_OUTSIDE)
            hint = f'exclude = ["{own.rpartition(".")[2]}"] in [model.lora]'
            if not isinstance(layer, Linear) or layer.fan_in_fan_out:
                kind = type(layer.get_base_layer()).__name__
                raise ConfigError(f"layer {own} ({kind}) can have no adapter: it is not linear", hint=hint)
            if own in tied:
                raise ConfigError(
                    f"layer {own} can have no adapter: its weight is tied to another", hint=hint
                )

    def tensors(self) -> Exported:
        """Walk over the adapter by peft's names, in the dtype that it has; all ranks take part."""
        with self._on_device():
            for name, layer in self._layers.items():
                yield f"{name}.lora_A.weight", _whole(layer.lora_A[_NAME].weight)
                yield f"{name}.lora_B.weight", _whole(layer.lora_B[_NAME].weight)

    def merged(self, *, keep: bool) -> Exported:
        """Walk over the whole weights by their Hugging Face names, each with what the adapter adds to it.

        The sum is made in float32, one tensor after the other, and has the weight's dtype only with `keep`. The model
        stays as it is. All ranks take part.
        """
        with self._on_device():
            for name, weight in self._model.module.state_dict().items():
                if is_of_adapter(name):
                    continue
                layer, _, leaf = name.rpartition(_BASE)
                if layer and leaf == "weight":
                    total = weight.detach().float() + self._added(self._layers[layer])
                    weight = total.to(weight.dtype) if keep else total  # noqa: PLW2901 - the name is its
                yield name.removeprefix(_OUTSIDE).replace(_BASE, "."), _whole(weight)

    def companions(self, base: str) -> Mapping[str, bytes]:
        config = self._model.module.peft_config[_NAME].to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": base}
        text = json.dumps({key: _plain(value) for key, value in config.items()}, indent=2, sort_keys=True)
        return {ADAPTER_CONFIG: text.encode() + b"\n"}

    @staticmethod
    def _added(layer: Any) -> torch.Tensor:
        """Return what a layer's adapter adds to its weight, in float32 and spread as the weight is."""
        down, up = layer.lora_A[_NAME].weight.detach().float(), layer.lora_B[_NAME].weight.detach().float()
        if isinstance(down, DTensor):  # each rank has its rows of B, and needs all of A
            down = down.redistribute(placements=[Replicate()] * down.device_mesh.ndim)
        added: torch.Tensor = (up @ down) * layer.scaling[_NAME]
        return added

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Have the parameters where collectives take them, if they are kept in main memory between passes."""
        if not self._model.engine_config.param_offload:
            yield
            return
        load_fsdp_model_to_gpu(self._model.module)
        try:
            yield
        finally:
            offload_fsdp_model_to_cpu(self._model.module)


class WithoutAdapter:
    """A model without its adapter, for passes without gradients: the reference model, which needs no second copy."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def engine_config(self) -> Any:
        return self._model.engine_config

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self._model.eval_mode(), self._model.disable_adapter():
            # peft freezes it. In the first pass FSDP2 reads from what is not frozen in which dtype gradients come.
            for name, parameter in self._model.module.named_parameters():
                parameter.requires_grad_(is_of_adapter(name))
            yield

    def infer_batch(self, data: Any) -> dict[str, Any]:
        return self._model.infer_batch(data)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def is_of_adapter(name: str) -> bool:
    return _OWN in name


def base_file(base: AdapterBase) -> dict[str, bytes]:
    """Return the file of a training state that says which model its adapter belongs to."""
    return {_RECORD: encode(base.document())}


def require_base(directory: str, base: AdapterBase) -> None:
    path = f"{directory}/{_RECORD}"
    try:
        saved = AdapterBase.from_fields(read_document(LocalDisk(), path))
    except OSError as error:
        raise CorruptDataError(f"the training state has no {_RECORD}: {error.strerror}", path=path) from error
    if saved.digest != base.digest:
        text = f"the saved adapter belongs to {saved.digest}, and {base.model} is {base.digest} now"
        raise ConfigError(text, path=path, hint=f"put back the model that was at {saved.model}")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value
