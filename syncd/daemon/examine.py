"""Examines one step directory of this protocol: what it is, and whether its content is good enough to publish."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.disk import (
    MISSING,
    DirectoryEntry,
    Disk,
    FileStat,
    exists,
    list_if_there,
    tree_stats,
)
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, MANIFEST, RECEIPTS, Job, step_name
from syncd.protocol.lineage import delta_problems, shortcut_problems
from syncd.protocol.manifest import (
    Manifest,
    damaged_files,
    decode_manifest,
    missing_files,
    missing_records,
    read_manifest,
)
from syncd.protocol.receipt import receipts_directory
from syncd.protocol.safetensors import Header, read_header, signature
from syncd.protocol.step import Step, StepShortcut, StepState


def examine_native(disk: Disk, root: str, step: int, before: Step | None = None) -> Step | None:
    """Return the state of a step that this protocol wrote, None for a directory that it did not write.

    Cost: two listings, the manifest, and one stat a file that it names; contents are not read. The other files of a
    full checkpoint are looked at once, for their size.
    """
    directory = step_name(step)
    path = f"{root}/{directory}"
    names = {entry.name: entry for entry in list_if_there(disk, path)}
    full = FULL_CHECKPOINT in names
    if MANIFEST in names:
        return _sealed(disk, path, step, before, full=full)
    payload = {entry.name for entry in list_if_there(disk, f"{path}/{ACTOR}")}
    if RECEIPTS not in payload and (payload or set(names) - {ACTOR}):
        return None
    receipts = list_if_there(disk, receipts_directory(path)) if payload else []
    return _filling(step, directory, receipts, full=full)


def examine_attempt(disk: Disk, root: str, step: int, directory: str) -> Step | None:
    """Return the state of an attempt to write a step, None for one that is gone.

    Its size is that of what is written so far. `touched` shows what leaves the size as it was: a rename, or a
    temporary file that came and went between two looks.
    """
    path = f"{root}/{directory}"
    try:
        disk.list(path)  # an empty one is there, too: its writer was killed before it wrote anything
        itself = disk.stat(path)
    except MISSING:
        return None
    receipts = list_if_there(disk, receipts_directory(path))
    below = list(tree_stats(disk, path))
    touched = tuple(sorted(file.mtime_ns for file in (itself, *below)))
    return _filling(step, directory, receipts, size=_size(below), touched=touched)


def _filling(step: int, directory: str, receipts: Iterable[DirectoryEntry], **more: Any) -> Step:
    present, expected = count_receipts(receipts)
    problem = f"{present} of {expected} writers are done" if expected else "no writer is done yet"
    return Step(step, directory, present=present, expected=expected, problem=problem, **more)


def count_receipts(entries: Iterable[DirectoryEntry]) -> tuple[int, int | None]:
    """Return how many writers have left a receipt, and of how many, by the receipts' names alone."""
    sizes: Counter[int] = Counter()
    for entry in entries:
        writer, separator, size = entry.name.removesuffix(".json").partition("-of-")
        if entry.kind == "file" and separator and writer.isdecimal() and size.isdecimal():
            sizes[int(size)] += 1
    if not sizes:
        return 0, None
    expected, present = sizes.most_common(1)[0]
    return present, expected


def _sealed(disk: Disk, path: str, step: int, before: Step | None, *, full: bool) -> Step | None:
    sealed = Step(step, step_name(step), full=full)
    try:
        manifest = decode_manifest(disk.read(f"{path}/{MANIFEST}"), f"{path}/{MANIFEST}")
        wrong = missing_files(disk, path, manifest)
    except MISSING:
        return replace(sealed, problem="the manifest was just removed")
    except CorruptDataError as error:
        later = isinstance(error, ProtocolTooNewError)
        return replace(sealed, state=StepState.DAMAGED, problem=error.message, later=later)
    if manifest.step != step:
        wrong = [f"the manifest is of step {manifest.step}"]
    shards, size = _count_shards(disk, path, manifest, wrong), manifest.size
    if full:
        # Its mark comes after its files: from then on it does not change.
        same = before is not None and before.full and before.digest == manifest.digest
        size = before.size if before and same else tree_size(disk, path)
    return replace(
        sealed,
        state=StepState.DAMAGED if wrong else StepState.COMPLETE,
        payload=manifest.uri or f"{sealed.directory}/{manifest.payload}",
        kind=manifest.kind,
        digest=manifest.digest,
        present=manifest.world_size,
        expected=manifest.world_size,
        shards=shards,
        size=size,
        parent=manifest.parent,
        whole_size=manifest.whole_size if manifest.changes else size,
        density=_density(manifest.delta),
        shortcut=_shortcut(disk, path, manifest),
        problem=wrong[0] if wrong else "",
    )


def _density(changes: DeltaHeader | None) -> float | None:
    return round(changes.changed / changes.elements, 6) if changes and changes.elements else None


def _shortcut(disk: Disk, path: str, manifest: Manifest) -> StepShortcut | None:
    shortcut = manifest.shortcut
    if shortcut is None:
        return StepShortcut(None, problem=manifest.shortcut_problem) if manifest.shortcut_problem else None
    wrong = missing_records(disk, path, shortcut.containers)
    size = sum(record.size for record in shortcut.containers)
    return StepShortcut(shortcut.parent, size, _density(manifest.changes), wrong[0] if wrong else "")


def _count_shards(disk: Disk, path: str, manifest: Manifest, wrong: list[str]) -> tuple[int, int]:
    expected = len(manifest.shards)
    if not wrong:
        return expected, expected
    return sum(exists(disk, f"{path}/{record.name}") for record in manifest.shards), expected


def tree_size(disk: Disk, path: str) -> int:
    return _size(tree_stats(disk, path))


def _size(files: Iterable[FileStat]) -> int:
    return sum(file.size for file in files if file.kind != "directory")


class VerifyLevel(StrEnum):
    """How closely a step is verified before it is published.

    size: every file is there with its size. header: every safetensors header parses and accounts for every byte of
    its file, and no tensor is in two shards. content: every byte is read and matches its digest.
    """

    SIZE = "size"
    HEADER = "header"
    CONTENT = "content"


def problems_of(
    job: Job, step: Step, level: VerifyLevel, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return what is wrong with a complete step, nothing when it is good.

    Foreign steps were checked by their layout. The lineage of a delta is proved at each level: from the manifests of
    its chain, and from `header` on also from its frames.
    """
    if not step.is_native or step.kind == "remote" or (level is VerifyLevel.SIZE and step.kind != "delta"):
        return []
    path = job.step(step.step)
    try:
        manifest = read_manifest(job.disk, path)
        if level is VerifyLevel.SIZE:
            return delta_problems(job, manifest, tables=False, progress=progress)
        wrong = _headers(job, path, manifest, progress)
        wrong = wrong or delta_problems(job, manifest, tables=True, progress=progress)
        return wrong or (
            damaged_files(job.disk, path, manifest, progress) if level is VerifyLevel.CONTENT else []
        )
    except (*MISSING, CorruptDataError) as error:
        return [str(error)]


def shortcut_problem_of(
    job: Job, step: Step, level: VerifyLevel, progress: Callable[[], None] = lambda: None
) -> str:
    """Return why nobody can use the shortcut of a complete step, empty when it is proved or there is none.

    At level `size` the containers are not read.
    """
    if step.shortcut is None or step.shortcut.problem:
        return step.shortcut.problem if step.shortcut else ""
    try:
        manifest = read_manifest(job.disk, job.step(step.step))
        tables = level is not VerifyLevel.SIZE
        return next(iter(shortcut_problems(job, manifest, tables=tables, progress=progress)), "")
    except (*MISSING, CorruptDataError) as error:
        return str(error)


def _headers(job: Job, path: str, manifest: Manifest, progress: Callable[[], None]) -> list[str]:
    wrong: list[str] = []
    try:
        signature(_sound_headers(job, path, manifest, progress, wrong))
    except CorruptDataError as error:
        wrong.append(error.message)
    return wrong


def _sound_headers(
    job: Job, path: str, manifest: Manifest, progress: Callable[[], None], wrong: list[str]
) -> Iterator[Header]:
    """Yield the headers that describe their files, and append what is wrong with the others."""
    for record in manifest.shards:
        progress()
        try:
            read = read_header if manifest.kind == "delta" else read_weights_header
            header = read(job.disk, f"{path}/{record.name}", progress)
        except (*MISSING, CorruptDataError) as error:
            wrong.append(f"{record.name}: {error}")
            continue
        if record.tensors and len(header.tensors) != record.tensors:
            wrong.append(f"{record.name}: {len(header.tensors)} tensors of {record.tensors}")
            continue
        yield header
