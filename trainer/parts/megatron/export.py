"""Weights in a distributed checkpoint of Megatron (`dist_ckpt`), by their Hugging Face names.

Llama, Qwen2 and Qwen3 as mbridge names and cuts them. megatron-core is not needed. What `.metadata` pickles is opened
with a list of classes that hold data alone, and each piece of a tensor with `weights_only`: no code in the files is
run. Pieces are put together from any number of ranks and any layout.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from syncd.errors import ConfigError, CorruptDataError, storage_error
from syncd.protocol.disk import Disk, exists
from syncd.protocol.documents import parse_json
from trainer.export.weights import TensorKind
from trainer.safe_unpickle import METADATA, RUNS_CODE

_METADATA = ".metadata"
_LAYERS = "decoder.layers."
_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_OF_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""The tensors of a layer, which Megatron stacks over all layers, with those of Hugging Face that are in them."""


@dataclass(frozen=True, slots=True)
class _TensorPart:
    """Where a tensor is: Megatron's, the layer in it if it is stacked, and its number among those that are in it."""

    name: str
    layer: int | None = None
    part: int = 0
    parts: int = 1


def has_dist_ckpt(disk: Disk, directory: str) -> bool:
    return exists(disk, f"{directory}/{_METADATA}")


def open_split_weights(disk: Disk, directory: str, config: str) -> "MegatronFiles | None":
    return MegatronFiles(directory, config) if has_dist_ckpt(disk, directory) else None


class MegatronFiles:
    """Weights in a distributed checkpoint; the model's config.json says how many heads an attention has."""

    def __init__(self, directory: str, config: str) -> None:
        self._directory = directory
        self._metadata = _read_metadata(f"{directory}/{_METADATA}")
        self._heads = _read_heads(config)
        tensors = {
            name: metadata
            for name, metadata in self._metadata.state_dict_metadata.items()
            if isinstance(metadata, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        self._parts = dict(self._named(tensors))
        self.kinds = {
            name: TensorKind(tensors[part.name].properties.dtype, self._shape(tensors[part.name], part))
            for name, part in self._parts.items()
        }

    def read(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        metadata = self._metadata.state_dict_metadata[part.name]
        assert isinstance(metadata, TensorStorageMetadata)
        whole = self._stacked(part, metadata)
        if part.parts == 1:
            return whole
        lengths = self._lengths(whole.shape[0], part.parts)
        if part.parts == len("qkv"):
            groups = whole.reshape(self._heads.groups, -1, *whole.shape[1:])
            cuts = [length // self._heads.groups for length in lengths]
            return torch.split(groups, cuts, 1)[part.part].reshape(-1, *whole.shape[1:]).contiguous()
        return torch.split(whole, lengths)[part.part].contiguous()

    def _named(self, tensors: Mapping[str, TensorStorageMetadata]) -> Iterator[tuple[str, _TensorPart]]:
        for name, metadata in tensors.items():
            names = _OF_LAYER.get(name.removeprefix(_LAYERS)) if name.startswith(_LAYERS) else None
            if name in _WHOLE:
                yield _WHOLE[name], _TensorPart(name)
            elif names is None:
                text = f"tensor {name!r} is not of Llama, Qwen2 or Qwen3"
                raise ConfigError(text, path=self._directory, hint="python -m verl.model_merger merge")
            else:
                for layer in range(metadata.size[0]):
                    for part, own in enumerate(names):
                        yield f"model.layers.{layer}.{own}", _TensorPart(name, layer, part, len(names))

    def _shape(self, metadata: TensorStorageMetadata, part: _TensorPart) -> tuple[int, ...]:
        shape = tuple(metadata.size) if part.layer is None else tuple(metadata.size)[1:]
        return (self._lengths(shape[0], part.parts)[part.part], *shape[1:])

    def _lengths(self, rows: int, parts: int) -> list[int]:
        """Return how many rows of a tensor belong to each of those that are in it."""
        if parts != len("qkv"):
            return [rows // parts] * parts
        size, left = divmod(rows, self._heads.queries + 2 * self._heads.groups)
        if left:
            raise CorruptDataError("config.json has other heads than the weights", path=self._directory)
        return [size * heads for heads in (self._heads.queries, self._heads.groups, self._heads.groups)]

    def _stacked(self, part: _TensorPart, metadata: TensorStorageMetadata) -> torch.Tensor:
        """Return Megatron's tensor, of one layer if it is stacked, put together from all pieces."""
        shape = metadata.size if part.layer is None else metadata.size[1:]
        whole, filled = torch.empty(shape, dtype=metadata.properties.dtype), 0
        for chunk in metadata.chunks:
            offsets, layer = chunk.offsets, 0
            if part.layer is not None:
                layer, offsets = part.layer - chunk.offsets[0], chunk.offsets[1:]
                if not 0 <= layer < chunk.sizes[0]:
                    continue
            piece = self._piece(part.name, chunk.offsets).reshape(chunk.sizes)
            piece = piece if part.layer is None else piece[layer]
            region = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
            whole[region].copy_(piece)
            filled += piece.numel()
        if filled != whole.numel():
            raise CorruptDataError(f"tensor {part.name!r} is incomplete", path=self._directory)
        return whole

    def _piece(self, name: str, offsets: torch.Size) -> torch.Tensor:
        info = self._metadata.storage_data[MetadataIndex(name, offsets)]
        path = f"{self._directory}/{info.relative_path}"
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except OSError as error:
            raise storage_error(error, path) from error
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CorruptDataError(f"a piece of {name!r} cannot be read: {error}", path=path) from error
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach()


@dataclass(frozen=True, slots=True)
class _Heads:
    """How many heads ask in an attention, and how many answer."""

    queries: int
    groups: int


def _read_heads(path: str) -> _Heads:
    try:
        with open(path, encoding="utf-8") as file:
            config = parse_json(file.read())
        queries = int(config["num_attention_heads"])
        return _Heads(queries, int(config.get("num_key_value_heads") or queries))
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError("it has no number of attention heads", path=path) from error


class _PlainUnpickler(pickle.Unpickler):
    """Opens what holds data alone."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA.get(module, ()):
            raise NotImplementedError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: str) -> Metadata:
    try:
        with open(path, "rb") as file:
            metadata = _PlainUnpickler(file).load()
    except OSError as error:
        raise storage_error(error, path) from error
    except NotImplementedError as error:
        raise ConfigError(f"{RUNS_CODE}: {error}", path=path) from error
    except Exception as error:
        raise CorruptDataError(f"not the metadata of a distributed checkpoint: {error}", path=path) from error
    if not isinstance(metadata, Metadata):
        raise CorruptDataError("not the metadata of a distributed checkpoint", path=path)
    return metadata
