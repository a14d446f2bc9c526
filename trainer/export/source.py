"""Finds the weights of a step, and the files beside them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from syncd.errors import (
    CorruptDataError,
    JobMissingError,
    NotReadyError,
    UsageError,
)
from syncd.protocol.adapter_base import weight_files
from syncd.protocol.disk import MISSING, Disk, exists, list_if_there
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, Job, parse_attempt_name, parse_step_name
from syncd.protocol.manifest import Manifest, missing_files, read_manifest
from syncd.protocol.receipt import FileRecord, receipts_directory, record_chunks
from trainer.config.lora import read_adapter_config
from trainer.config.model_files import companion_names
from trainer.export.adapters import MergedWeights, find_base_directory
from trainer.export.fsdp import FsdpFiles, has_fsdp_files
from trainer.export.weights import ModelWeights, SafetensorsFiles, split_weights

TRAINING = "training"
CRITIC = "critic"
CONFIG = "config.json"
_DIST_CKPT = "model/dist_ckpt"
_SHARD = ".safetensors"
_INDEX = ".safetensors.index.json"
_OTHER_WEIGHTS = (_SHARD, _INDEX, ".bin", ".bin.index.json", ".pt")


@dataclass(frozen=True, slots=True)
class ExportSource:
    path: str  # the step's directory
    weights: ModelWeights
    companions: Mapping[str, str]  # files beside them: the name in the export, and the path
    # What the manifest says of files, by the name in the export.
    records: Mapping[str, FileRecord] = field(default_factory=dict)
    # Names of the files that hold exactly the weights, where they can be taken as they are.
    shards: tuple[str, ...] = ()


def find_source(job: Job, step: int, *, full_precision: bool, base: str | None = None) -> ExportSource:
    """Return where to export a step from, a full checkpoint's training state before its weights if `full_precision`.

    `base` is the directory of an adapter's base; the one that its writer had unless given.
    """
    path = job.step(step)
    _require_there(job, step)
    try:
        manifest = read_manifest(job.disk, path)
    except MISSING:
        manifest = None
    if manifest and manifest.kind == "lora":
        return _merged(job.disk, path, manifest, base, full_precision=full_precision)
    if base is not None:
        raise UsageError(f"step {step} holds no adapter, so no base belongs to it", path=path)
    if manifest is None:
        return _foreign(job.disk, path, step)
    return _native(job.disk, path, manifest, full_precision=full_precision)


def find_delta(job: Job, step: int) -> Manifest | None:
    """Return the manifest of a step that is stored as a delta, None for any other and where there is none."""
    try:
        manifest = read_manifest(job.disk, job.step(step))
    except (*MISSING, CorruptDataError):
        return None  # `find_source` says what is wrong
    return manifest if manifest.kind == "delta" else None


def find_materialised(job: Job, manifest: Manifest, directory: str, *, full_precision: bool) -> ExportSource:
    """Return where to export a delta from, of which `directory` has the materialised files in `actor`."""
    shards, files = manifest.whole_shards, manifest.whole_files
    whole = replace(manifest, kind="weights", delta=None, shards=shards, files=files)
    path = job.step(manifest.step)
    return _native(job.disk, path, whole, full_precision=full_precision, directory=directory)


def find_critic(job: Job, step: int) -> ExportSource:
    """Return the critic of a full checkpoint, of this trainer's or of verl's."""
    disk, path = job.disk, job.step(step)
    _require_there(job, step)
    own, foreign = f"{path}/{TRAINING}/{CRITIC}", f"{path}/{CRITIC}"
    directory = next((candidate for candidate in (own, foreign) if has_fsdp_files(disk, candidate)), None)
    if directory is None:
        hint = "full checkpoints of jobs with critic.enabled = true have one"
        raise UsageError(f"step {step} holds no critic", path=path, hint=hint)
    if directory == own and not exists(disk, f"{path}/{FULL_CHECKPOINT}"):
        raise NotReadyError(f"the full checkpoint of step {step} is not complete", path=path)
    return ExportSource(path, FsdpFiles(disk, directory), _companions(disk, f"{directory}/huggingface"))


def _require_there(job: Job, step: int) -> None:
    try:
        names = [entry.name for entry in job.disk.list(job.root)]
    except MISSING:
        raise JobMissingError("the job directory does not exist", path=job.root) from None
    steps = sorted(number for number in map(parse_step_name, names) if number is not None)
    if step not in steps and step in map(parse_attempt_name, names):
        raise NotReadyError(f"step {step} is not complete: it is being written", path=job.root)
    if step not in steps:
        raise UsageError(
            f"there is no step {step}",
            path=job.root,
            hint=f"existing steps: {', '.join(map(str, steps[-10:])) or 'none'}",
        )


def find_adapter(job: Job, step: int) -> ExportSource:
    path = job.step(step)
    _require_there(job, step)
    try:
        manifest = read_manifest(job.disk, path)
    except MISSING:
        raise NotReadyError(f"step {step} is not complete: it has no manifest", path=path) from None
    if manifest.kind != "lora":
        raise UsageError(f"step {step} holds no adapter: it is of kind {manifest.kind}", path=path)
    _require_whole(disk := job.disk, path, manifest)
    records = {_exported(record): record for record in (*manifest.shards, *manifest.files)}
    adapter = SafetensorsFiles(disk, [f"{path}/{record.name}" for record in manifest.shards])
    beside = {_exported(record): f"{path}/{record.name}" for record in manifest.files}
    return ExportSource(path, adapter, beside, records, tuple(map(_exported, manifest.shards)))


def _merged(
    disk: Disk, path: str, manifest: Manifest, base: str | None, *, full_precision: bool
) -> ExportSource:
    _require_whole(disk, path, manifest)
    for record in (*manifest.shards, *manifest.files):
        for _ in record_chunks(disk, f"{path}/{record.name}", record):
            pass
    config = read_adapter_config(f"{path}/{ACTOR}")
    directory = find_base_directory(disk, manifest.base, config, base)
    adapter: ModelWeights = SafetensorsFiles(disk, [f"{path}/{record.name}" for record in manifest.shards])
    if full_precision and has_fsdp_files(disk, f"{path}/{TRAINING}"):
        _require_full(disk, path, manifest)
        adapter = FsdpFiles(disk, f"{path}/{TRAINING}", adapters=True)
    weights = SafetensorsFiles(disk, weight_files(disk, directory))
    names = [CONFIG, *companion_names(directory, code=True)]
    beside = {name: os.path.realpath(f"{directory}/{name}") for name in names}
    return ExportSource(path, MergedWeights(weights, adapter, config, wide=full_precision), beside)


def _require_whole(disk: Disk, path: str, manifest: Manifest) -> None:
    if wrong := missing_files(disk, path, manifest):
        raise CorruptDataError(
            f"step {manifest.step} is not complete: {wrong[0]}", path=path, hint="syncd verify JOB STEP"
        )


def _require_full(disk: Disk, path: str, manifest: Manifest) -> None:
    if FULL_CHECKPOINT not in {entry.name for entry in disk.list(path)}:
        raise NotReadyError(f"the full checkpoint of step {manifest.step} is not complete", path=path)


def _native(
    disk: Disk, path: str, manifest: Manifest, *, full_precision: bool, directory: str = ""
) -> ExportSource:
    """Return where to export a step from, whose files are in `directory` if they are not in the step itself."""
    directory = directory or path
    _require_whole(disk, directory, manifest)
    _require_model(manifest, path)
    records = {_exported(record): record for record in (*manifest.shards, *manifest.files)}
    names = [name for name in records if not name.endswith(_OTHER_WEIGHTS)]
    beside = {name: f"{directory}/{records[name].name}" for name in names}
    training = f"{path}/{TRAINING}"
    if (full_precision or not manifest.shards) and has_fsdp_files(disk, training):
        _require_full(disk, path, manifest)
        return ExportSource(
            path, FsdpFiles(disk, training), beside or _companions(disk, f"{training}/huggingface"), records
        )
    split = f"{training}/{_DIST_CKPT}"
    if (
        not manifest.shards
        and CONFIG in beside
        and (split_files := split_weights(disk, split, beside[CONFIG]))
    ):
        _require_full(disk, path, manifest)
        return ExportSource(path, split_files, beside, records)
    weights = SafetensorsFiles(disk, [f"{directory}/{record.name}" for record in manifest.shards])
    return ExportSource(directory, weights, beside, records, tuple(map(_exported, manifest.shards)))


def _exported(record: FileRecord) -> str:
    return record.name.removeprefix(f"{ACTOR}/")


def _require_model(manifest: Manifest, path: str) -> None:
    if manifest.kind == "remote":
        raise UsageError(f"step {manifest.step} does not hold a complete model: {manifest.uri}", path=path)


def _foreign(disk: Disk, path: str, step: int) -> ExportSource:
    """Return the weights of a directory of verl's: the ranks' files, a Hugging Face directory, or Megatron's."""
    actor = f"{path}/{ACTOR}"
    if not exists(disk, receipts_directory(path)):  # else it is one of ours, on its way
        for directory in (actor, path):
            if has_fsdp_files(disk, directory):
                return ExportSource(
                    path, FsdpFiles(disk, directory), _companions(disk, f"{directory}/huggingface")
                )
        for directory in (f"{actor}/huggingface", f"{actor}/model/huggingface", actor):
            if shards := [name for name in _files(disk, directory) if name.endswith(_SHARD)]:
                weights = SafetensorsFiles(disk, [f"{directory}/{name}" for name in sorted(shards)])
                return ExportSource(path, weights, _companions(disk, directory))
        for folder in (_DIST_CKPT, "dist_ckpt"):
            beside = _companions(disk, f"{actor}/{folder}".removesuffix("dist_ckpt") + "huggingface")
            if CONFIG in beside and (split_files := split_weights(disk, f"{actor}/{folder}", beside[CONFIG])):
                return ExportSource(path, split_files, beside)
    raise NotReadyError(f"step {step} is not complete: it has no manifest", path=path)


def _companions(disk: Disk, directory: str) -> dict[str, str]:
    names = [name for name in _files(disk, directory) if not name.endswith(_OTHER_WEIGHTS)]
    return {name: f"{directory}/{name}" for name in names}


def _files(disk: Disk, directory: str, prefix: str = "") -> Iterator[str]:
    """Yield the regular files below a directory, hidden ones left out, links not followed."""
    for entry in list_if_there(disk, f"{directory}/{prefix}".rstrip("/")):
        if entry.name.startswith("."):
            continue
        if entry.kind == "file":
            yield f"{prefix}{entry.name}"
        elif entry.kind == "directory":
            yield from _files(disk, directory, f"{prefix}{entry.name}/")
