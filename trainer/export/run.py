"""Exports one step: a directory that appears whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from syncd.errors import CorruptDataError, TryAgainError, UsageError, storage_error
from syncd.protocol.digest import chunks
from syncd.protocol.disk import MISSING, Disk, is_below, remove_tree, temporary_name
from syncd.protocol.documents import parse_json
from syncd.protocol.layout import ACTOR, Job, shard_name
from syncd.protocol.receipt import FileRecord, record_chunks
from syncd.transports.delta.materialise import materialise
from syncd.transports.files.export_walk import (
    ExportedTensor,
    ShardLayout,
    TensorSpec,
    cast_of,
    encode_index,
)
from syncd.transports.files.shard import BUFFERED, THREADS, Ring, ShardDigest, ShardWriter, find_write_mode
from syncd.transports.torch_tensors import FROM_TORCH
from trainer.export.source import (
    CONFIG,
    ExportSource,
    find_adapter,
    find_critic,
    find_delta,
    find_materialised,
    find_source,
)
from trainer.export.weights import ModelWeights, leave_out_tied

SHARD_LIMIT = 5_000_000_000  # bytes of the tensors of one file, unless one tensor alone has more

INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
"""What weights can be cast to, by name."""


def export(
    job_dir: str,
    step: int,
    out: str,
    dtype: str | None = None,
    *,
    base: str | None = None,
    adapter: bool = False,
    critic: bool = False,
) -> None:
    """Write a step as a complete Hugging Face directory, or nothing. An adapter is merged into its base.

    Args:
        step: A step, a full checkpoint, or a `global_step_<N>` directory of verl's.
        out: A directory that is not there yet, or is empty.
        dtype: What floating-point weights become, a key of `DTYPES`; as they are stored unless given.
            `float32` takes the training weights of a full checkpoint where there are some.
        base: The directory of the model that an adapter belongs to; the one that its writer had unless given.
        adapter: Write the adapter alone, as peft reads it.
        critic: Whether the critic of a full checkpoint is exported instead of the policy.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"{dtype!r} is not a dtype of weights", hint=f"one of {', '.join(DTYPES)}")
    if adapter and (dtype or base or critic):
        hint = "leave out --dtype, --base and --critic"
        raise UsageError("--adapter copies the adapter as it is", hint=hint)
    if critic and base:
        raise UsageError("a critic has no adapter, so no base belongs to it", hint="leave out --base")
    job, target = Job.at(job_dir), os.path.realpath(out)
    if is_below(target, job.step(step)):
        raise UsageError(
            "an export cannot go into the step that it is of",
            path=target,
            hint="name a directory outside the step",
        )
    try:
        with (
            _opened(job, step, target, dtype, base=base, adapter=adapter, critic=critic) as source,
            staged(job.disk, target) as directory,
        ):
            _fill(job.disk, source, directory, DTYPES[dtype] if dtype else None)
    except OSError as error:
        if isinstance(error, MISSING) and is_below(str(error.filename), job.step(step)):
            raise TryAgainError(
                f"step {step} was removed while it was read",
                path=error.filename,
                hint=f"syncd pin {job_dir} {step}  # keeps a step",
            ) from error
        raise storage_error(error, target) from error


@contextlib.contextmanager
def _opened(
    job: Job, step: int, out: str, dtype: str | None, *, base: str | None, adapter: bool, critic: bool
) -> Iterator[ExportSource]:
    """Give what is exported; a delta is made whole beside `out`, until the end of the block."""
    with contextlib.ExitStack() as scratch:
        if adapter:
            source = find_adapter(job, step)
        elif critic:
            source = find_critic(job, step)
        elif base is None and (manifest := find_delta(job, step)):
            rebuilt = scratch.enter_context(_whole(job, step, out))
            source = find_materialised(job, manifest, rebuilt, full_precision=dtype == "float32")
        else:
            source = find_source(job, step, full_precision=dtype == "float32", base=base)
        if not adapter and CONFIG not in source.companions:
            text = f"there is no {CONFIG} with the weights, so no engine can load them"
            raise CorruptDataError(text, path=source.path)
        yield source


def _fill(disk: Disk, source: ExportSource, directory: str, dtype: torch.dtype | None) -> None:
    for name, path in source.companions.items():
        copy_file(disk, path, f"{directory}/{name}", source.records.get(name))
    if source.shards and dtype is None:
        for name in (*source.shards, *({INDEX} & source.records.keys())):
            record = source.records[name]
            copy_file(disk, f"{source.path}/{record.name}", f"{directory}/{name}", record)
    else:
        _rewrite(disk, source, directory, dtype)


def _rewrite(disk: Disk, source: ExportSource, directory: str, dtype: torch.dtype | None) -> None:
    for name in source.shards:
        record = source.records[name]
        for _ in record_chunks(disk, f"{source.path}/{record.name}", record):
            pass
    config = f"{directory}/{CONFIG}"
    content = disk.read(config)
    if not source.shards:
        leave_out_tied(source.weights, directory)
    write_weights(disk, directory, source.weights, dtype)
    dtypes = _dtypes(source.weights, dtype)
    if len(dtypes) == 1:
        disk.replace(config, config_with_dtype(content, source.companions[CONFIG], *dtypes))


def _dtypes(weights: ModelWeights, dtype: torch.dtype | None) -> set[str]:
    kinds = {cast_of(kind.dtype, dtype) for kind in weights.kinds.values()}
    return {str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point}


@contextlib.contextmanager
def _whole(job: Job, step: int, out: str) -> Iterator[str]:
    """Give a hidden directory beside `out` in whose `actor` the files of a delta are whole; remove it at the end."""
    _require_free(job.disk, out)
    parent, name = os.path.split(out)
    directory = f"{parent}/{temporary_name(name)}"
    job.disk.make_directory(directory)
    try:
        materialise(job, step, f"{directory}/{ACTOR}")
        yield directory
    finally:
        with contextlib.suppress(OSError):
            remove_tree(job.disk, directory)


@contextlib.contextmanager
def staged(disk: Disk, out: str) -> Iterator[str]:
    """Give an empty directory beside `out` that takes its place at the end, durably; an error removes it."""
    _require_free(disk, out)
    parent, name = os.path.split(out)
    disk.make_directory(parent)
    directory = f"{parent}/{temporary_name(name)}"
    disk.make_directory(directory)
    try:
        yield directory
        for below, _, _ in os.walk(directory):
            disk.sync_directory(below)
        disk.rename(directory, out)  # refused if the place was filled meanwhile
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(disk, directory)
        raise
    disk.sync_directory(parent)


def _require_free(disk: Disk, out: str) -> None:
    try:
        is_free = disk.stat(out).kind == "directory" and not disk.list(out)
    except MISSING:
        is_free = True
    if not is_free:
        raise UsageError("the export would replace existing files", path=out, hint="name a new directory")


def copy_file(disk: Disk, source: str, target: str, record: FileRecord | None = None) -> None:
    """Copy a file durably and piece by piece."""
    disk.make_directory(os.path.dirname(target))
    disk.replace(target, record_chunks(disk, source, record) if record else chunks(disk, source))


def write_weights(disk: Disk, directory: str, weights: ModelWeights, dtype: torch.dtype | None) -> None:
    """Write weights into an empty directory as safetensors files of at most `SHARD_LIMIT` bytes, and the index.

    Each tensor is read, cast on its way through a ring of 48 MiB, and released. Floating-point tensors are cast to
    `dtype`, those of one byte left as they are; None keeps all.
    """
    files = [ShardLayout(specs) for specs in split(_specs(weights, dtype), SHARD_LIMIT)]
    mode, ring = find_write_mode(directory) or BUFFERED, Ring()
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(THREADS, "export-write") as pool:
        for number, layout in enumerate(files, start=1):
            name = shard_name(number, len(files))
            digest = ShardDigest(layout, check=False)
            with ShardWriter(f"{directory}/{name}", layout, mode, pool, digest) as shard:
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
    """Return a config.json that names the dtype of the weights beside it, by which transformers loads them."""
    try:
        config = parse_json(content)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CorruptDataError("not a JSON object", path=path)
    return json.dumps(_named(config, dtype), indent=2, ensure_ascii=False).encode() + b"\n"


def _named(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    named = {key: _named(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    return named | {key: dtype for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)}
