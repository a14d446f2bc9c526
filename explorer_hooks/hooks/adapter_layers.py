"""What SGLang 0.5.23 does not look at before it takes an adapter, and ends of or answers wrongly with.

It compares an adapter with the model when the first request names it, and ends if they do not fit
(`adapter_shapes.py`) or the model has none of its layers. It computes
q_proj, k_proj and v_proj as one layer, gate_proj and up_proj as another: of the first it needs q_proj and v_proj of
the adapter, of the second gate_proj, else it finds no layer for the rest and ends too. It adds B.A times
alpha / rank, whatever else the adapter's configuration says.
"""

from collections.abc import Collection, Mapping
from typing import Any

from explorer_hooks.hooks.adapter_shapes import layers_of, refused, require_shapes
from explorer_hooks.proof.start_check import StartModel
from syncd.errors import RefusedError
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import Tensors

_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
_NO_BIAS = "none"
_NEEDED = {
    "q_proj": ("q_proj", "v_proj"),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj", "v_proj"),
    "up_proj": ("gate_proj",),
}
"""The layers beside it that an adapter must have too if it has one of this name."""


def require_servable(target: WeightDirectory, config: Mapping[str, Any], start: StartModel | None) -> None:
    """Return if SGLang serves an adapter as peft does, and survives it.

    Args:
        start: The model that the server was started with; None if this host cannot read it, then names and shapes are
            not compared with it.
    """
    _require_plain(target, config)
    layers = layers_of(target)
    if layers.others:
        raise refused(target, f"{layers.others[0]} is no A or B of a layer")
    require_shapes(target, config, layers, start)
    model = None if start is None else start.tensors
    for layer in layers.halves:
        if model is not None and f"{layer}.weight" not in model:
            raise refused(target, f"the engine's model has no {layer}")
        _require_stack(target, layer, layers.halves.keys(), model)


def _require_plain(target: WeightDirectory, config: Mapping[str, Any]) -> None:
    """Return if an adapter is B.A times alpha / rank for each layer, and nothing besides."""
    unsupported = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", _NO_BIAS) != _NO_BIAS:
        unsupported.append("bias")
    if unsupported:
        raise RefusedError(
            f"SGLang serves no adapters with {', '.join(unsupported)}",
            path=target.path,
            hint='kind = "vllm", or train without',
        )


def _require_stack(
    target: WeightDirectory, layer: str, layers: Collection[str], model: Tensors | None
) -> None:
    """Return if the adapter has what SGLang computes together with a layer."""
    parent, _, own = layer.rpartition(".")
    for other in _NEEDED.get(own, ()):
        beside = f"{parent}.{other}"
        if beside not in layers and (model is None or f"{beside}.weight" in model):
            raise refused(target, f"it has {layer} without {beside}, which SGLang computes together")
