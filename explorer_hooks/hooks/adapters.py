"""What hooks for adapters share: the checks of an adapter's files, of its base, and of its matrices.

Neither engine compares these with its model in time. vLLM 0.32.0 copies what fits of a matrix into its own and serves
that, and passes over layers that the model does not have. SGLang 0.5.23 ends at the first request.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from explorer_hooks.proof.start_model import StartModel
from syncd.errors import RefusedError, SyncdError
from syncd.protocol.adapter_base import model_digest
from syncd.protocol.layout import ADAPTER, ADAPTER_CONFIG
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import read_header
from syncd.safe_open import open_read
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta, tensors_of

_MAX_CONFIG = 1 << 20

_HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
_WRAPPED = "base_model.model."
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""The dtypes of weights that are not packed: these have the shape of their layer."""


def require_adapter(target: WeightDirectory) -> dict[str, Any]:
    """Return an adapter's configuration once its two files are there, the weights as the manifest has them."""
    if target.shards and ADAPTER not in {shard.name for shard in target.shards}:
        raise RefusedError(
            f"the manifest of version {target.label} has no {ADAPTER}", path=target.path, hint="syncd ls JOB"
        )
    if not os.path.isfile(f"{target.path}/{ADAPTER}"):
        raise RefusedError(f"{ADAPTER} does not exist", path=target.path, hint="syncd verify JOB STEP --deep")
    config = f"{target.path}/{ADAPTER_CONFIG}"
    document = _document_of(config)
    if document.get("peft_type") != "LORA":
        raise RefusedError("peft_type is not LORA", path=config, hint="save the adapter with peft")
    return document


def _document_of(path: str) -> dict[str, Any]:
    try:
        with open(open_read(path), "rb") as file:
            document = json.loads(file.read(_MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(
            f"it cannot be read: {error}", path=path, hint="syncd verify JOB STEP --deep"
        ) from error
    if not isinstance(document, dict):
        raise RefusedError("it is not a JSON object", path=path, hint="syncd verify JOB STEP --deep")
    return document


class BaseCheck:
    """Compares the model that an adapter belongs to with the one that an engine was started with.

    Args:
        find: Returns the directory of the engine's model on this host, empty if it is not known here. It is called
            for each adapter, because an engine may be restarted; the digest of a directory is computed once.
    """

    def __init__(self, find: Callable[[], str]) -> None:
        self._find = find
        self._digests: dict[str, str | None] = {}

    def require(self, target: WeightDirectory) -> None:
        """Refuse an adapter that belongs to another model; nothing is compared where one of the two is not known."""
        directory = self._find() if target.base is not None else ""
        if target.base is None or not directory:
            return
        if directory not in self._digests:
            self._digests[directory] = _digest_of(directory)
        digest = self._digests[directory]
        if digest is not None and digest != target.base.digest:
            raise RefusedError(
                f"the adapter belongs to {target.base.model} ({target.base.digest}), and the engine runs {digest}",
                path=directory,
                hint=f"start the engine with the model that the trainer has as {target.base.model}",
            )


def _digest_of(directory: str) -> str | None:
    try:
        return model_digest(LocalDisk(), directory)
    except (SyncdError, OSError):  # not here, not in safetensors
        return None


class Halves(NamedTuple):
    """The shapes of A and B of one layer, empty where one is missing."""

    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()


class Layers(NamedTuple):
    halves: Mapping[str, Halves]  # the shapes of A and B by the layer's name in the model
    others: tuple[str, ...]  # the names of tensors that are neither


def layers_of(target: WeightDirectory) -> Layers:
    path = f"{target.path}/{ADAPTER}"
    try:
        tensors = tensors_of([read_header(LocalDisk(), path)])
    except (OSError, SyncdError) as error:
        raise RefusedError(
            f"it cannot be read: {error}", path=path, hint="syncd verify JOB STEP --deep"
        ) from error
    halves: dict[str, Halves] = defaultdict(Halves)
    for name, meta in tensors.items():
        if match := _HALF.fullmatch(name):
            layer = match["layer"].removeprefix(_WRAPPED)
            halves[layer] = halves[layer]._replace(**{match["half"].lower(): tuple(meta.shape)})
    return Layers(dict(halves), tuple(name for name in tensors if not _HALF.fullmatch(name)))


def require_shapes(
    target: WeightDirectory, config: Mapping[str, Any], layers: Layers, start: StartModel | None
) -> None:
    """Return if A and B of each layer have the rank and, multiplied, the shape of the layer's weight.

    Args:
        start: The model that the server was started with; None if this host cannot read it. If it has none of the
            adapter's layers, its file names them otherwise than peft, and nothing is compared.
    """
    for layer, halves in layers.halves.items():
        _require_rank(target, layer, halves, config)
    model = {} if start is None else start.tensors
    if not any(f"{layer}.weight" in model for layer in layers.halves):
        return
    for layer, halves in layers.halves.items():
        weight = model.get(f"{layer}.weight")
        if weight is not None:
            _require_fit(target, layer, halves, weight, is_transposed=config.get("fan_in_fan_out") is True)
        elif start is not None and not _is_named_otherwise(layer, start):
            raise refused(target, f"the engine's model has no {layer}")


def refused(target: WeightDirectory, text: str) -> RefusedError:
    hint = "compare [model.lora] of the job with the model that the engine was started with"
    return RefusedError(text, path=target.path, hint=hint)


def _require_rank(target: WeightDirectory, layer: str, halves: Halves, config: Mapping[str, Any]) -> None:
    ranks = [*halves.a[:1], *halves.b[1:]]
    rank = ranks[0] if ranks and config.get("rank_pattern") else config.get("r")
    if [len(halves.a), len(halves.b), *ranks] != [2, 2, rank, rank]:
        text = f"A and B of {layer} have the shapes {list(halves.a)} and {list(halves.b)}, and the rank is {rank}"
        raise refused(target, text)


def _require_fit(
    target: WeightDirectory, layer: str, halves: Halves, weight: TensorMeta, *, is_transposed: bool
) -> None:
    shape = [halves.b[0], halves.a[1]]
    weight_shape = list(weight.shape)[::-1] if is_transposed else list(weight.shape)
    if weight.dtype in _PLAIN and weight_shape != shape:
        raise refused(target, f"B.A of {layer} has the shape {shape}, and its weight {weight_shape}")


def _is_named_otherwise(layer: str, start: StartModel) -> bool:
    """Return whether a layer is a tied head, is of experts, which files stack, or has its weight in packed parts."""
    path = layer.split(".")
    is_tied_head = start.is_tied and path[-1] == "lm_head"
    return is_tied_head or "experts" in path or any(name.startswith(f"{layer}.") for name in start.tensors)
