"""Publishes any directory of safetensors, from any trainer, as a step of a job.

`publish_export` copies, checks and hashes an export in one pass, seals the step, then announces it.
"""

import uuid
from collections.abc import Iterator

from syncd.errors import AlreadySealedError, CorruptDataError, StorageError, UsageError
from syncd.protocol.digest import chunks, digest_file, name_of
from syncd.protocol.disk import Disk, is_directory
from syncd.protocol.layout import ACTOR, MAX_STEP, Job
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import read_marker
from syncd.protocol.writer import StepWriter
from syncd.publishing.export import Export, FollowingDisk, read_export
from syncd.publishing.finite import FiniteCheck

__all__ = ["Export", "FollowingDisk", "publish_export", "read_export"]


def publish_export(
    job: Job, step: int, disk: Disk, export: Export, *, rewind: bool = False, allow_nonfinite: bool = False
) -> Manifest:
    """Copy an export into a job as a sealed step, and announce it once all of it has been checked.

    A call that fails before it seals the step leaves nothing. One that is killed leaves a directory of its attempt,
    which the daemon removes, or a sealed step, which the same call announces.

    Args:
        job: The job; its directory must exist.
        step: The step to become.
        disk: The file system of the export.
        export: The export.
        rewind: Whether the step may be lower than what the marker names: explorers then go back to it.
        allow_nonfinite: Whether weights may hold NaN and infinity.

    Raises:
        AlreadySealedError: The step exists, or another process published it meanwhile; it stays as it is.
        UsageError: It would be a rewind that was not asked for.
        CorruptDataError: The export has changed since it was read.
        NonFiniteError: A tensor holds NaN or infinity.
    """
    _check(job, step, rewind=rewind)
    writer = StepWriter(job, step, 1, uuid.uuid4().hex)
    try:
        writer.begin()
    except AlreadySealedError:
        manifest = _unannounced(job, step, disk, export)
        if manifest is None:
            raise
    else:
        manifest = _written(writer, disk, export, rewind=rewind, check=not allow_nonfinite)
    writer.announce()
    return manifest


def _written(writer: StepWriter, disk: Disk, export: Export, *, rewind: bool, check: bool) -> Manifest:
    """Copy an export and seal the step; whatever fails, nothing is left of this attempt."""
    try:
        shards = [_copy(writer, disk, export, name, check=check) for name in export.shards]
        files = [_copy(writer, disk, export, name, check=False) for name in export.files]
        _check(writer.job, writer.step, rewind=rewind)  # meanwhile a later step may have been announced
        writer.receipt(1, shards, files)
        manifest = writer.seal(kind=export.kind)
    except BaseException:
        writer.discard()
        raise
    if manifest is None:
        raise StorageError("the receipt that was just written is not there", path=writer.path)
    return manifest


def _unannounced(job: Job, step: int, disk: Disk, export: Export) -> Manifest | None:
    """Return the manifest of a sealed step that is this export and that no marker has named, None for any other.

    A call that was killed between its seal and the marker leaves such a step.
    """
    named = read_marker(job.disk, job.marker).step
    if named is not None and named >= step:
        return None
    sealed = read_manifest(job.disk, job.step(step))
    records = {record.name: record for record in (*sealed.shards, *sealed.files)}
    if records.keys() != {f"{ACTOR}/{name}" for name in export.stats}:
        return None
    for path, record in records.items():
        name = path.removeprefix(f"{ACTOR}/")
        found = digest_file(disk, f"{export.directory}/{name}", name_of(record.digest))
        if found != (record.digest, record.size):
            return None
    return sealed


def _check(job: Job, step: int, *, rewind: bool) -> None:
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is out of range")
    if not is_directory(job.disk, job.root):
        raise UsageError("the job directory is not there", path=job.root, hint=f"mkdir -p {job.root}")
    named = read_marker(job.disk, job.marker).step
    if named is not None and step < named and not rewind:
        raise UsageError(
            f"step {step} is below the newest, {named}: explorers would go back to it",
            path=job.root,
            hint="publish a higher step, or say --rewind",
        )


def _copy(writer: StepWriter, disk: Disk, export: Export, name: str, *, check: bool) -> FileRecord:
    path, header = f"{export.directory}/{name}", export.shards.get(name)
    pieces = chunks(disk, path)
    if header is not None and check:
        pieces = _finite(pieces, FiniteCheck(header, path))
    record = writer.write(f"{ACTOR}/{name}", pieces, len(header.tensors) if header else 0)
    if disk.stat(path) != export.stats[name] or record.size != export.stats[name].size:
        raise CorruptDataError(
            "the file changed while it was copied", path=path, hint="publish it once its writer is done"
        )
    return record


def _finite(pieces: Iterator[bytes], check: FiniteCheck) -> Iterator[bytes]:
    for piece in pieces:
        check.feed(piece)
        yield piece
