"""What SGLang 0.5.23 does not look at before it takes an adapter, and ends of or answers wrongly with.

It compares an adapter with the model when the first request names it, and ends if they do not fit. It computes
q_proj, k_proj and v_proj as one layer, gate_proj and up_proj as another: of the first it needs q_proj and v_proj of
the adapter, of the second gate_proj, else it finds no layer for the rest and ends too. It adds B.A times
alpha / rank, whatever else the adapter's configuration says.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from explorer_hooks.hooks.start_check import StartModel
from syncd.errors import RefusedError, SyncdError
from syncd.protocol.layout import ADAPTER
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import read_header
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import Tensors, tensors_of

_HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
_WRAPPED = "base_model.model."
_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
_NO_BIAS = "none"
_NEEDED = {
    "q_proj": ("q_proj", "v_proj"),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj", "v_proj"),
    "up_proj": ("gate_proj",),
}
"""The layers beside it that an adapter must have too if it has one of this name."""


class _Halves(NamedTuple):
    """The shapes of A and B of one layer, empty where one is missing."""

    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()


def require_servable(target: WeightDirectory, config: Mapping[str, Any], start: StartModel | None) -> None:
    """Return if SGLang serves an adapter as peft does, and survives it.

    Args:
        target: The adapter.
        config: Its adapter_config.json.
        start: The model that the server was started with; None if this host cannot read it, then names and shapes are
            not compared with it.

    Raises:
        RefusedError: It does not.
    """
    _require_plain(target, config)
    layers = _layers(target, _tensors(target))
    known = None if start is None else start.tensors
    for layer, halves in layers.items():
        _require_shapes(target, layer, halves, config.get("r"), known)
        _require_stack(target, layer, frozenset(layers), known)


def _require_plain(target: WeightDirectory, config: Mapping[str, Any]) -> None:
    """Return if an adapter is B.A times alpha / rank for each layer, and nothing besides."""
    found = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", _NO_BIAS) != _NO_BIAS:
        found.append("bias")
    if found:
        raise RefusedError(
            f"SGLang serves no adapters with {', '.join(found)}",
            path=target.path,
            hint='kind = "vllm", or train without',
        )


def _tensors(target: WeightDirectory) -> Tensors:
    path = f"{target.path}/{ADAPTER}"
    try:
        return tensors_of([read_header(LocalDisk(), path)])
    except (OSError, SyncdError) as error:
        raise RefusedError(f"it cannot be read: {error}", path=path, hint="syncd verify --deep") from error


def _layers(target: WeightDirectory, tensors: Tensors) -> dict[str, _Halves]:
    """Return the shapes of A and B by the layer's name in the model.

    Raises:
        RefusedError: A tensor is neither.
    """
    layers: dict[str, _Halves] = defaultdict(_Halves)
    for name, meta in tensors.items():
        found = _HALF.fullmatch(name)
        if found is None:
            raise _refused(target, f"{name} is no A or B of a layer")
        layer = found["layer"].removeprefix(_WRAPPED)
        layers[layer] = layers[layer]._replace(**{found["half"].lower(): tuple(meta.shape)})
    return dict(layers)


def _require_shapes(
    target: WeightDirectory, layer: str, halves: _Halves, rank: object, known: Tensors | None
) -> None:
    """Return if A and B have the rank and, multiplied, the shape of the layer's weight."""
    if [*halves.a[:1], *halves.b[1:]] != [rank, rank]:
        text = f"A and B of {layer} have the shapes {list(halves.a)} and {list(halves.b)}, and the rank is {rank}"
        raise _refused(target, text)
    if known is None:
        return
    weight = known.get(f"{layer}.weight")
    if weight is None:
        raise _refused(target, f"the engine's model has no {layer}")
    if tuple(weight.shape) != (halves.b[0], halves.a[1]):
        shape = [halves.b[0], halves.a[1]]
        raise _refused(target, f"B.A of {layer} has the shape {shape}, and its weight {list(weight.shape)}")


def _require_stack(
    target: WeightDirectory, layer: str, layers: frozenset[str], known: Tensors | None
) -> None:
    """Return if the adapter has what SGLang computes together with a layer."""
    parent, _, own = layer.rpartition(".")
    for other in _NEEDED.get(own, ()):
        beside = f"{parent}.{other}"
        if beside not in layers and (known is None or f"{beside}.weight" in known):
            raise _refused(target, f"it has {layer} without {beside}, which SGLang computes together")


def _refused(target: WeightDirectory, text: str) -> RefusedError:
    return RefusedError(text, path=target.path, hint="choose targets in [model.lora] that SGLang can serve")
