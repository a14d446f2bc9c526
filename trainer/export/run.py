"""Exports one step from start to end."""

import os
from collections.abc import Mapping

import torch

from syncd.errors import CorruptDataError, TryAgainError, UsageError, storage_error
from syncd.protocol.disk import MISSING, Disk, is_below
from syncd.protocol.layout import Job
from syncd.transports.filesystem.export_walk import cast_of
from trainer.export.source import CONFIG, ExportSource, find_source
from trainer.export.target import (
    INDEX,
    check_file,
    config_with_dtype,
    copy_file,
    staged,
    write_weights,
)
from trainer.export.weights import ModelWeights, leave_out_tied

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
"""What weights can be cast to, by name."""


def export(job_dir: str, step: int, out: str, dtype: str | None = None) -> None:
    """Write a step as a complete Hugging Face directory, or nothing.

    Args:
        job_dir: The job directory.
        step: A step, a full checkpoint, or a `global_step_<N>` directory of verl's.
        out: A directory that is not there yet, or is empty.
        dtype: What floating-point weights become, a key of `DTYPES`; as they are stored unless given.
            `float32` takes the training weights of a full checkpoint where there are some.

    Raises:
        UsageError: There is no such step, it holds no whole model, or `out` is taken.
        NotReadyError: The step is not complete.
        CorruptDataError: It is damaged.
        ConfigError: It holds what only loads by running code from it.
        TryAgainError: It was removed meanwhile.
        StorageError: The file system refused, such as a full one.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"no weights are {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    job, target = Job.at(job_dir), os.path.realpath(out)
    if is_below(target, job.step(step)):
        raise UsageError("nothing is added to a step", path=target, hint="name a directory elsewhere")
    try:
        source = find_source(job, step, full_precision=dtype == "float32")
        if CONFIG not in source.companions:
            text = f"there is no {CONFIG} with the weights, so nobody can load them"
            raise CorruptDataError(text, path=source.path)
        with staged(job.disk, target) as directory:
            _fill(job.disk, source, directory, DTYPES[dtype] if dtype else None)
    except OSError as error:
        if isinstance(error, MISSING) and is_below(str(error.filename), job.step(step)):
            raise TryAgainError(
                f"step {step} was removed while it was read",
                path=error.filename,
                hint=f"syncd pin {job_dir} {step}  # keeps a step",
            ) from error
        raise storage_error(error, target) from error


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
        check_file(disk, f"{source.path}/{record.name}", record)
    config = f"{directory}/{CONFIG}"
    content = disk.read(config)
    if not source.shards:
        leave_out_tied(source.weights, directory)
    write_weights(disk, directory, source.weights, dtype)
    found = _dtypes(source.weights, dtype)
    if len(found) == 1:
        disk.replace(config, config_with_dtype(content, source.companions[CONFIG], *found))


def _dtypes(weights: ModelWeights, dtype: torch.dtype | None) -> set[str]:
    """Return the names of the floating-point dtypes that are written."""
    kinds = {cast_of(kind.dtype, dtype) for kind in weights.kinds.values()}
    return {str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point}
