"""Writes an export: a directory that appears whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.digest import chunks
from syncd.protocol.disk import MISSING, Disk, remove_tree, temporary_name
from syncd.protocol.layout import shard_name
from syncd.protocol.receipt import FileRecord, record_chunks
from syncd.transports.filesystem.export_walk import (
    ExportedTensor,
    ShardLayout,
    TensorSpec,
    cast_of,
    encode_index,
)
from syncd.transports.filesystem.shard import THREADS, Ring, ShardWriter, find_write_mode
from syncd.transports.torch_tensors import FROM_TORCH
from trainer.export.weights import ModelWeights

SHARD_LIMIT = 5_000_000_000
"""Bytes of the tensors of one file, unless one tensor alone has more."""

INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def staged(disk: Disk, out: str) -> Iterator[str]:
    """Give an empty directory beside `out` that takes its place at the end, durably; an error removes it.

    Raises:
        UsageError: There is something at `out` already.
    """
    if not _is_free(disk, out):
        raise UsageError("the export would replace what is there", path=out, hint="name a new directory")
    parent, name = os.path.split(out)
    disk.make_directory(parent)
    directory = f"{parent}/{temporary_name(name)}"
    disk.make_directory(directory)
    try:
        yield directory
        _sync_tree(disk, directory)
        disk.rename(directory, out)  # refused if the place was filled meanwhile
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(disk, directory)
        raise
    disk.sync_directory(parent)


def _is_free(disk: Disk, out: str) -> bool:
    try:
        return disk.stat(out).kind == "directory" and not disk.list(out)
    except MISSING:
        return True


def _sync_tree(disk: Disk, directory: str) -> None:
    for entry in disk.list(directory):
        if entry.kind == "directory":
            _sync_tree(disk, f"{directory}/{entry.name}")
    disk.sync_directory(directory)


def copy_file(disk: Disk, source: str, target: str, record: FileRecord | None = None) -> None:
    """Copy a file durably and piece by piece.

    Raises:
        CorruptDataError: What was read is not what the record says.
    """
    disk.make_directory(os.path.dirname(target))
    disk.replace(target, record_chunks(disk, source, record) if record else chunks(disk, source))


def write_weights(disk: Disk, directory: str, weights: ModelWeights, dtype: torch.dtype | None) -> None:
    """Write weights as safetensors files of at most `SHARD_LIMIT` bytes, and the index.

    Each tensor is read, cast on its way through a ring of 48 MiB, and released.

    Args:
        disk: Where the directory is.
        directory: An empty directory.
        weights: What is written.
        dtype: What floating-point tensors are cast to, those of one byte left as they are; None keeps all.
    """
    files = [ShardLayout(specs) for specs in split(_specs(weights, dtype), SHARD_LIMIT)]
    mode, ring = find_write_mode(directory), Ring()
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(THREADS, "export-write") as pool:
        for number, layout in enumerate(files, start=1):
            name = shard_name(number, len(files))
            with ShardWriter(f"{directory}/{name}", layout, mode, pool, check=False) as shard:
                _pour(weights, layout, ring, shard, dtype)
                shard.finish()
            weight_map |= {spec.name: name for spec in layout.specs}
    index = encode_index(weight_map, sum(layout.data_size for layout in files))
    disk.replace(f"{directory}/{INDEX}", index)


def _pour(
    weights: ModelWeights, layout: ShardLayout, ring: Ring, shard: ShardWriter, dtype: torch.dtype | None
) -> None:
    ring.begin()
    for spec in layout.specs:
        tensor = weights.read(spec.name)
        ring.add(shard, ExportedTensor(spec, tensor, cast_of(tensor.dtype, dtype)))
    ring.flush(shard)


def _specs(weights: ModelWeights, dtype: torch.dtype | None) -> Iterator[TensorSpec]:
    for name, (stored, shape) in weights.kinds.items():
        becomes = cast_of(stored, dtype)
        if becomes not in FROM_TORCH:
            raise CorruptDataError(f"tensor {name!r} is {stored}, which safetensors does not have")
        yield TensorSpec(name, FROM_TORCH[becomes], shape, torch.Size(shape).numel() * becomes.itemsize)


def split(specs: Iterable[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Return the tensors in order, cut into groups of at most `limit` bytes; one larger tensor is its own."""
    groups: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not groups or size + spec.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.size
    return groups


def config_with_dtype(content: bytes, path: str, dtype: str) -> bytes:
    """Return a config.json that names the dtype of the weights beside it, by which transformers loads them.

    Raises:
        CorruptDataError: It is not a JSON object.
    """
    try:
        config = json.loads(content)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CorruptDataError("not a JSON object", path=path)
    return json.dumps(_named(config, dtype), indent=2, ensure_ascii=False).encode() + b"\n"


def _named(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    named = {key: _named(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    return named | {key: dtype for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)}
