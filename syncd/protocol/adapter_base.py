"""The model that an adapter belongs to: what a manifest says of it, and the digest by which it is recognised.

The digest is of samples: it costs the same for every size of model, a few thousand small reads, and not one pass over
all weights. It covers the name, dtype and shape of each tensor and, of at most `SAMPLED` tensors spread evenly over
the sorted names, the bytes of three blocks. So it does not depend on how the tensors are divided into files. Another
training run differs in nearly every tensor and is found; a change of a few bytes outside of the blocks is not.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncd.errors import ConfigError, CorruptDataError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.digest import DEFAULT, hasher, name_of
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import Document, Fields, as_document, parse_json, record_from
from syncd.protocol.layout import ACTOR, Job, parse_step_name
from syncd.protocol.safetensors import Tensor, signature

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SAMPLED = 1024  # the most tensors of which bytes are read
BLOCK = 4096  # bytes of one block; a tensor has one at its beginning, one in the middle and one at its end

_INDEX_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class AdapterBase:
    digest: str  # what `model_digest` says of it
    model: str  # its directory as the trainer's file has it
    step: int | None = None  # the step of the same job that it is; None if it is none

    @staticmethod
    def from_fields(fields: Fields) -> "AdapterBase":
        base = record_from(AdapterBase, fields)
        name_of(base.digest, fields.path)
        return base

    def document(self) -> Document:
        return as_document(self)


def find_base(job: Job, model: str) -> AdapterBase:
    return AdapterBase(model_digest(job.disk, model), model, _step_at(job, model))


def model_digest(disk: Disk, model: str) -> str:
    """Return the digest of a model directory's weights: `xxh3_128:<hex>`."""
    try:
        headers = {path: read_weights_header(disk, path) for path in weight_files(disk, model)}
        described = sorted((name, *kind) for name, kind in signature(headers.values()).items())
    except (*MISSING, CorruptDataError) as error:
        raise ConfigError(f"the model's safetensors files are incomplete: {error}", path=model) from error
    state = hasher(DEFAULT)
    state.update(json.dumps(described, separators=(",", ":")).encode())
    places = sorted(
        (tensor.name, path, header.data_offset, tensor)
        for path, header in headers.items()
        for tensor in header.tensors.values()
    )
    for _, path, offset, tensor in _spread(places):
        for start in _blocks(tensor):
            state.update(disk.read_at(path, offset + start, min(BLOCK, tensor.end - start)))
    return f"{DEFAULT}:{state.hexdigest()}"


def weight_files(disk: Disk, model: str) -> list[str]:
    """Return the paths of the safetensors files of a model directory, links resolved: a hub's cache has links."""
    return [os.path.realpath(f"{model}/{name}") for name in _shards(disk, model)]


def _shards(disk: Disk, model: str) -> list[str]:
    names = {entry.name for entry in disk.list(os.path.realpath(model))}
    if WHOLE in names:
        return [WHOLE]
    if INDEX not in names:
        hint = "save the model with save_pretrained(DIR, safe_serialization=True)"
        raise ConfigError(
            "the model has no weights in safetensors, which a base needs", path=model, hint=hint
        )
    try:
        index = parse_json(disk.read(os.path.realpath(f"{model}/{INDEX}"), _INDEX_LIMIT))
        return sorted(set(index["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError("not an index of weights", path=f"{model}/{INDEX}") from error


Place = tuple[str, str, int, Tensor]


def _spread(places: Sequence[Place]) -> Iterator[Place]:
    """Yield at most `SAMPLED` of them at equal distances, the first among them."""
    count = min(SAMPLED, len(places))
    yield from (places[number * len(places) // count] for number in range(count))


def _blocks(tensor: Tensor) -> list[int]:
    """Return where its blocks begin, in bytes from the beginning of the file's data."""
    last = max(tensor.start, tensor.end - BLOCK)
    return sorted({tensor.start, (tensor.start + last) // 2, last})


def _step_at(job: Job, model: str) -> int | None:
    """Return the step of the job that a model directory lies in."""
    root, path = f"{os.path.realpath(job.root)}/", os.path.realpath(model)
    parts = path.removeprefix(root).split("/") if path.startswith(root) else []
    return parse_step_name(parts[0]) if parts[1:2] == [ACTOR] else None
