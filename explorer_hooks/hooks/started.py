"""Whether a version fits the model that an engine behind HTTP was started from.

Such an engine does not say which tensors it holds. The directory that it was started from does: a version of the same
model has the same tensors with the same shapes. Floating-point dtypes may differ, since engines convert. Names may
differ only where the engine serves the same weights either way:

- A head that is tied to the embedding may be there or not. Whether it is tied, config.json says; where it does not, a
  directory without a head does.
- What an engine computes from its configuration and never loads: rotary tables, causal masks.
- What the checkpoint has besides the model, for prediction of several tokens at once: engines leave it out.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from explorer_hooks.base import TensorMeta
from explorer_hooks.fit import Tensors, common, fit, require
from syncd.errors import SyncdError
from syncd.opening import open_read
from syncd.protocol.disk import LocalDisk
from syncd.protocol.safetensors import read_header

CHECKS = ("full", "shapes", "off")

_SUFFIX = ".safetensors"
_CONFIG = "config.json"
_MAX_CONFIG = 1 << 20

_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings)\.weight")
_ROTARY = re.compile(r".*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)")
_MASK = re.compile(r".*\.(?:attn|attention)\.(?:bias|masked_bias)")
_POSITIONS = re.compile(r".*\.position_ids")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\..*")
_PREDICTION = re.compile(r"mtp\..*")


class Start(NamedTuple):
    """What an engine was started from.

    Args:
        tensors: What each of its tensors is, by name.
        config: Its config.json; empty where there is none.
    """

    tensors: Tensors
    config: Mapping[str, Any]

    @property
    def is_tied(self) -> bool:
        """Say whether the head is the embedding: config.json says so, or is silent and there is no head."""
        parts = (self.config, self.config.get("text_config"))
        said = [part.get("tie_word_embeddings") for part in parts if isinstance(part, Mapping)]
        known = [one for one in said if type(one) is bool]
        return all(known) if known else not any(map(_HEAD.fullmatch, self.tensors))

    def may_lack(self, name: str, meta: TensorMeta) -> bool:
        """Say whether a version may lack a tensor of the start: the engine serves the same without it."""
        is_tied_head = self.is_tied and _HEAD.fullmatch(name) is not None
        is_besides = _PREDICTION.fullmatch(name) is not None or self._is_besides(name)
        is_constant = _is_computed(name, meta) or _POSITIONS.fullmatch(name) is not None
        return is_tied_head or is_besides or is_constant

    def may_add(self, name: str, meta: TensorMeta) -> bool:
        """Say whether a version may have a tensor that the start has not: the engine passes over it."""
        if _HEAD.fullmatch(name):
            return self.is_tied and meta.shape in set(self._embeddings())
        return _is_computed(name, meta)

    def _embeddings(self) -> Iterator[tuple[int, ...]]:
        return (meta.shape for name, meta in self.tensors.items() if _EMBEDDING.fullmatch(name))

    def _is_besides(self, name: str) -> bool:
        """Say whether a tensor is of a layer behind the last one of the model, which predicts further tokens."""
        layers, further = self.config.get("num_hidden_layers"), self.config.get("num_nextn_predict_layers")
        layer = _LAYER.fullmatch(name)
        if layer is None or type(layers) is not int or type(further) is not int or further < 1:
            return False
        return int(layer[1]) >= layers


def start_of(directory: str) -> Start | None:
    """Return what is in the directory that an engine was started from, None where it cannot be read from this host.

    A name that is no absolute path is the engine's own to resolve: a model of a hub, or a path from where it runs.
    """
    if not os.path.isabs(directory):
        return None
    try:
        tensors = {
            tensor.name: TensorMeta(tensor.dtype, tensor.shape)
            for name in sorted(os.listdir(directory))
            if name.endswith(_SUFFIX)
            for tensor in read_header(LocalDisk(), f"{directory}/{name}").tensors.values()
        }
    except (OSError, SyncdError):
        return None
    return Start(tensors, _config(f"{directory}/{_CONFIG}")) if tensors else None


def refuse_misfit(found: Tensors, start: Start, check: str, path: str) -> None:
    """Check a version against what an engine was started from.

    Args:
        found: The version's tensors; nothing is checked without any.
        start: What the engine was started from.
        check: `full`, `shapes`, or `off`.
        path: The version's directory, for messages.

    Raises:
        RefusedError: A tensor has another shape or a dtype that engines do not convert, or with `full` one is missing
            or unknown.
    """
    if not found or check == "off":
        return
    if check == "full":
        fits = fit(start.tensors, {}, found, cast=True, may_lack=start.may_lack, may_add=start.may_add)
    else:
        held, offered = common(start.tensors, found)
        fits = fit(held, {}, offered, cast=True)
    require(
        fits,
        "it does not fit the model that the engine was started from",
        path=path,
        hint="start the engine from a checkpoint of the model that is trained, or see start_check",
    )


def _is_computed(name: str, meta: TensorMeta) -> bool:
    if _MASK.fullmatch(name):
        # A bias that is trained is a vector; a mask is [1, 1, positions, positions], or one number.
        return not meta.shape or meta.shape[:2] == (1, 1)
    return _ROTARY.fullmatch(name) is not None


def _config(path: str) -> Mapping[str, Any]:
    try:
        with open(open_read(path), "rb") as file:
            document = json.loads(file.read(_MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
