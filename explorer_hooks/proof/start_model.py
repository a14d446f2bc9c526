"""Checks that a version fits the model that an engine behind HTTP was started from.

Such an engine does not list its tensors. The directory that it was started from does: a version of the same model has
the same tensors with the same shapes. Floating-point dtypes may differ, since engines convert. Names may differ only
if the engine serves the same weights either way:

- A head that is tied to the embedding may be missing. config.json says whether it is tied; if it does not, the head
  is tied if the directory has none.
- Rotary tables and causal masks: engines compute them and never load them.
- Layers that predict several tokens at once: checkpoints have them, engines leave them out.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from explorer_hooks.hook import EXAM_DIGEST
from syncd.errors import SyncdError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.digest import digest_file
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import read_header
from syncd.protocol.version import Version
from syncd.safe_open import open_read
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import SUFFIX, TensorMeta, Tensors, compare, in_both, require_fit, tensors_of

CHECKS = ("full", "shapes", "off")

_OTHER_NAMES = "consolidated"
"""The prefix of files that repeat the same weights under the names of another format."""

_MAX_DOCUMENT = 64 << 20
_LONGEST_COMMIT = 64
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")

_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings)\.weight")
_ROTARY = re.compile(r".*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)")
_MASK = re.compile(r".*\.(?:attn|attention)\.(?:bias|masked_bias)")
_POSITIONS = re.compile(r".*\.position_ids")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\..*")
_PREDICTION = re.compile(r"mtp\..*")


class StartModel(NamedTuple):
    tensors: Tensors  # dtype and shape of each tensor, by name
    config: Mapping[str, Any]  # its config.json; empty if there is none

    @property
    def is_tied(self) -> bool:
        """Return whether the head is the embedding: by config.json, else if there is no head."""
        parts = (self.config, self.config.get("text_config"))
        said = [part.get("tie_word_embeddings") for part in parts if isinstance(part, Mapping)]
        flags = [value for value in said if type(value) is bool]
        return all(flags) if flags else not any(map(_HEAD.fullmatch, self.tensors))

    @property
    def vocabulary(self) -> int | None:
        """Return how many tokens have an embedding, None if none is found."""
        return max((shape[0] for shape in self._embeddings() if shape), default=None)

    def may_lack(self, name: str, meta: TensorMeta) -> bool:
        """Return whether a version may lack a tensor of the model: the engine serves the same without it."""
        is_tied_head = self.is_tied and _HEAD.fullmatch(name) is not None
        is_besides = _PREDICTION.fullmatch(name) is not None or self._is_besides(name)
        is_constant = _is_computed(name, meta) or _POSITIONS.fullmatch(name) is not None
        return is_tied_head or is_besides or is_constant

    def may_add(self, name: str, meta: TensorMeta) -> bool:
        """Return whether a version may have a tensor that the model lacks: the engine ignores it."""
        if _HEAD.fullmatch(name):
            return self.is_tied and meta.shape in set(self._embeddings())
        return _is_computed(name, meta)

    def _embeddings(self) -> Iterator[tuple[int, ...]]:
        return (meta.shape for name, meta in self.tensors.items() if _EMBEDDING.fullmatch(name))

    def _is_besides(self, name: str) -> bool:
        """Return whether a tensor is of a layer behind the model's last one, which predicts further tokens."""
        layers, further = self.config.get("num_hidden_layers"), self.config.get("num_nextn_predict_layers")
        layer = _LAYER.fullmatch(name)
        if layer is None or type(layers) is not int or type(further) is not int or further < 1:
            return False
        return int(layer[1]) >= layers


def start_model_of(name: str) -> StartModel | None:
    """Return the model that an engine was started from, None if this host cannot read it.

    Args:
        name: An absolute path, or the name of a model of the Hugging Face hub, which is searched in this host's
            cache. Only the engine can resolve a relative path.
    """
    directory = name if os.path.isabs(name) else _cached(name)
    if directory is None:
        return None
    try:
        # In the hub's cache files are links.
        paths = [os.path.realpath(f"{directory}/{name}") for name in shard_names(directory)]
        tensors = tensors_of((read_weights_header(LocalDisk(), path) for path in paths), repeated=True)
    except (OSError, SyncdError):
        return None
    return StartModel(tensors, _document(f"{directory}/config.json")) if tensors else None


def require_same_model(tensors: Tensors, start: StartModel, check: str, path: str) -> None:
    """Return if a version fits the model that an engine was started from; one without tensors is not checked."""
    if not tensors or check == "off":
        return
    if check == "full":
        fits = compare(start.tensors, {}, tensors, cast=True, may_lack=start.may_lack, may_add=start.may_add)
    else:
        held, offered = in_both(start.tensors, tensors)
        fits = compare(held, {}, offered, cast=True)
    require_fit(
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


def shard_names(directory: str) -> list[str]:
    """Return the files of a directory that an engine reads: those that its index names, if it has one."""
    named = _document(f"{directory}/model.safetensors.index.json").get("weight_map")
    names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    if isinstance(named, dict):
        indexed = {name for name in named.values() if isinstance(name, str)}
        return [name for name in names if name in indexed]
    return [name for name in names if not name.startswith(_OTHER_NAMES)]


def target_of(path: str, kind: str = "weights") -> WeightDirectory:
    """Return a directory of whole weights, or an adapter, as what a hook loads, with the label of an exam."""
    disk, shards = LocalDisk(), []
    tensors: dict[str, TensorMeta] = {}
    for name in shard_names(path):
        file = os.path.realpath(f"{path}/{name}")
        header = read_header(disk, file)
        content, size = digest_file(disk, file)
        shards.append(FileRecord(name, size, content, len(header.tensors)))
        tensors |= {tensor.name: TensorMeta(tensor.dtype, tensor.shape) for tensor in header.tensors.values()}
    version = Version(0, 0, kind, path, EXAM_DIGEST)
    return WeightDirectory(version, path, tuple(shards), tensors, verified=True)


def _cached(name: str) -> str | None:
    if not _MODEL.fullmatch(name):
        return None
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    directory = f"{os.environ.get('HF_HUB_CACHE') or f'{home}/hub'}/models--{name.replace('/', '--')}"
    try:
        with open(open_read(f"{directory}/refs/main"), encoding="ascii") as file:
            commit = file.read(_LONGEST_COMMIT).strip()
    except (OSError, ValueError):
        return None
    return f"{directory}/snapshots/{commit}" if _COMMIT.fullmatch(commit) else None


def _document(path: str) -> Mapping[str, Any]:
    try:
        with open(open_read(os.path.realpath(path)), "rb") as file:
            document = json.loads(file.read(_MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
