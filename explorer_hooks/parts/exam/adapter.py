"""Makes an exam of adapters: one of the same layers and rank as a version's, and what peft answers with it.

    python -m explorer_hooks.parts.exam.adapter START ADAPTER COPY DTYPE < tokens.json > exam.json

A server loads each adapter anew, so nothing of it can stay as it was; a layer whose adapter the engine leaves out
answers as the model does. The copy's matrices follow from names and shapes alone: every host makes the same one.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from explorer_hooks.parts.exam.model import CHANGE, answers_of, copy_beside, kind_of, loaded, signs_of
from syncd.protocol.layout import ADAPTER

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
_NAME = "default"
"""What peft calls the one adapter."""


def make(start: str, adapter: str, target: str, dtype: str, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    import peft  # noqa: PLC0415 - takes seconds

    model = peft.PeftModel.from_pretrained(loaded(start, dtype), adapter, autocast_adapter_dtype=False).eval()
    dtypes = _dtypes(f"{adapter}/{ADAPTER}")
    os.makedirs(target)
    copy_beside(adapter, target)
    _change(model, dtypes)
    state = dict(model.named_parameters())
    tensors = {name: state[_inner(name)].detach().to(kind).contiguous() for name, kind in dtypes.items()}
    save_file(tensors, f"{target}/{ADAPTER}", {"format": "pt"})
    return dict(_measure(model, [name.removesuffix(_A) for name in dtypes if name.endswith(_A)], rows))


def _dtypes(path: str) -> Mapping[str, torch.dtype]:
    """Return the dtype of each matrix of an adapter; `ValueError` if it has something else, too."""
    with safe_open(path, framework="pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 - no mapping
    if others := [name for name in dtypes if not name.endswith((_A, _B))]:
        raise ValueError(f"{others[0]} is no matrix A or B of a layer")
    return dtypes


def _change(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the matrices values whose product is as large as a part of the layer's own weight."""
    state = dict(model.named_parameters())
    for name, dtype in dtypes.items():
        layer = model.get_submodule(name.removesuffix(_A).removesuffix(_B))
        matrix = state[_inner(name)]
        size = _size_of_b(layer) if name.endswith(_B) else layer.in_features**-0.5
        values = signs_of(name, matrix.numel()).reshape(matrix.shape) * size
        matrix.data = values.to(dtype).to(matrix.dtype)


def _size_of_b(layer: Any) -> float:
    weight = layer.get_base_layer().weight.detach().float()
    rank, scaling = layer.r[_NAME], layer.scaling[_NAME]
    root = float(weight.square().mean().sqrt())
    return float(CHANGE * root * (layer.in_features / rank) ** 0.5 / scaling)


def _measure(model: Any, layers: Sequence[str], rows: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(f"the adapter of {kind_of(name.removeprefix(_PREFIX))}", []).append(name)
    stale = {}
    for kind, names in sorted(kinds.items()):
        with _without(model, names):
            stale[kind] = answers_of(model, rows)
    with model.disable_adapter():
        start = answers_of(model, rows)
    return {"start": start, "exam": answers_of(model, rows), "kinds": stale}


@contextmanager
def _without(model: Any, layers: Sequence[str]) -> Iterator[None]:
    matrices = [model.get_submodule(layer).lora_B[_NAME].weight for layer in layers]
    kept = [matrix.data for matrix in matrices]
    for matrix in matrices:
        matrix.data = torch.zeros_like(matrix.data)
    try:
        yield
    finally:
        for matrix, data in zip(matrices, kept, strict=True):
            matrix.data = data


def _inner(name: str) -> str:
    """Return what peft calls a matrix in its model that it calls `name` in a file."""
    return name.removesuffix(".weight") + f".{_NAME}.weight"


def main() -> None:
    start, adapter, target, dtype = sys.argv[1:]
    sys.stdout.write(json.dumps(make(start, adapter, target, dtype, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
