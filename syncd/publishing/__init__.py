"""Publishes any directory of safetensors, from any trainer, as a step of a job.

`publish_export` copies, checks and hashes an export in one pass, seals the step, then announces it.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from syncd.errors import AlreadySealedError, CorruptDataError, StorageError, UsageError
from syncd.protocol.digest import chunks, digest_file, name_of
from syncd.protocol.disk import Disk, is_directory
from syncd.protocol.layout import ACTOR, MAX_STEP, Job
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.owner import refuse_mirrored
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import Changes, FileRecord, ShardRoots
from syncd.protocol.tile_digests import TileHasher
from syncd.protocol.version import read_marker
from syncd.protocol.writer import StepWriter
from syncd.publishing.export import Export, FollowingDisk, read_export
from syncd.publishing.finite import FiniteCheck

__all__ = [
    "Content",
    "Export",
    "FollowingDisk",
    "copy_file",
    "publish_export",
    "publish_written",
    "read_export",
    "require_unchanged",
]


def publish_export(
    job: Job,
    step: int,
    disk: Disk,
    export: Export,
    *,
    rewind: bool = False,
    allow_nonfinite: bool = False,
    probe: Probe | None = None,
    before_seal: Callable[[], None] = lambda: None,
) -> Manifest:
    """Copy an export into a job as a sealed step, and announce it once all of it has been checked.

    A call that fails before it seals the step leaves nothing. One that is killed leaves a directory of its attempt,
    which the daemon removes, or a sealed step, which the same call announces.

    Args:
        job: The job; its directory must exist.
        step: The step to become.
        disk: The file system of the export.
        rewind: Whether the step may be lower than what the marker names: explorers then go back to it.
        allow_nonfinite: Whether weights may hold NaN and infinity.
        probe: What the model answers with these weights.
        before_seal: Called once all has been checked: a daemon may publish the step from its seal on.

    Raises:
        AlreadySealedError: The step exists, or another process published it meanwhile; it stays as it is.
        UsageError: It would be a rewind that was not asked for.
        CorruptDataError: The export has changed since it was read.
        NonFiniteError: A tensor holds NaN or infinity.
    """

    def write(writer: StepWriter) -> Content:
        shards, roots, tiles = [], list[ShardRoots](), dict[str, bytes]()
        for name in export.shards:
            record, tiled = _copy(writer, disk, export, name, check=not allow_nonfinite)
            shards.append(record)
            roots.append(ShardRoots(record.name, tiled.hexdigest()))
            tiles[record.name] = tiled.records
        if export.kind == "weights":
            writer.tiles(1, tiles)
        files = [copy_file(writer, disk, export, name) for name in export.files]
        return Content(shards, files, export.kind, roots if export.kind == "weights" else ())

    return publish_written(
        job, step, disk, export, write, rewind=rewind, probe=probe, before_seal=before_seal
    )


@dataclass(frozen=True, slots=True)
class Content:
    """What was written into an attempt and is to be sealed."""

    shards: Sequence[FileRecord]  # the records of its safetensors files
    files: Sequence[FileRecord]  # the records of the files beside them
    kind: str  # the kind of the step
    roots: Sequence[ShardRoots] = ()  # the roots of the shard files, of whole weights and of a delta
    changes: Changes | None = None  # what a delta changes


def publish_written(
    job: Job,
    step: int,
    disk: Disk,
    export: Export,
    write: Callable[[StepWriter], Content],
    *,
    rewind: bool,
    probe: Probe | None,
    before_seal: Callable[[], None],
) -> Manifest:
    """Seal a step that stands for an export, and announce it; arguments and errors as those of `publish_export`.

    Args:
        write: Writes the files of the step into an attempt, and returns what they are.
        rewind: Whether the step may be lower than what the marker names.
    """

    def checked(writer: StepWriter) -> Content:
        content = write(writer)
        _check(job, step, rewind=rewind)  # meanwhile a later step may have been announced
        before_seal()
        return content

    _check(job, step, rewind=rewind)
    writer = StepWriter(job, step, 1, uuid.uuid4().hex)
    try:
        writer.begin()
    except AlreadySealedError:
        manifest = _unannounced(job, step, disk, export)
        if manifest is None or manifest.probe != probe:
            raise
        before_seal()
    else:
        manifest = _written(writer, checked, probe)
    writer.announce()
    return manifest


def _written(writer: StepWriter, write: Callable[[StepWriter], Content], probe: Probe | None) -> Manifest:
    """Write and seal the step; whatever fails, nothing is left of this attempt."""
    try:
        content = write(writer)
        writer.receipt(1, content.shards, content.files, probe, content.roots, content.changes)
        manifest = writer.seal(kind=content.kind)
    except BaseException:
        writer.discard()
        raise
    if manifest is None:
        raise StorageError("the receipt that was just written does not exist", path=writer.path)
    return manifest


def _unannounced(job: Job, step: int, disk: Disk, export: Export) -> Manifest | None:
    """Return the manifest of a sealed step that is this export and that no marker has named, None for any other.

    A call that was killed between its seal and the marker leaves such a step.
    """
    named = read_marker(job.disk, job.marker).step
    if named is not None and named >= step:
        return None
    sealed = read_manifest(job.disk, job.step(step))
    records = {record.name: record for record in (*sealed.whole_shards, *sealed.whole_files)}
    if records.keys() != {f"{ACTOR}/{name}" for name in export.stats}:
        return None
    for path, record in records.items():
        name = path.removeprefix(f"{ACTOR}/")
        digest_and_size = digest_file(disk, f"{export.directory}/{name}", name_of(record.digest))
        if digest_and_size != (record.digest, record.size):
            return None
    return sealed


def _check(job: Job, step: int, *, rewind: bool) -> None:
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is out of range")
    if not is_directory(job.disk, job.root):
        raise UsageError("the job directory does not exist", path=job.root, hint=f"mkdir -p {job.root}")
    refuse_mirrored(job, "a step of this command")
    named = read_marker(job.disk, job.marker).step
    if named is not None and step < named and not rewind:
        raise UsageError(
            f"step {step} is below the newest, {named}: explorers would roll back to it",
            path=job.root,
            hint="publish a higher step, or pass --rewind",
        )


def copy_file(
    writer: StepWriter,
    disk: Disk,
    export: Export,
    name: str,
    see: Callable[[bytes], None] = lambda _: None,
) -> FileRecord:
    """Copy a file of an export into the step."""
    path, header = f"{export.directory}/{name}", export.shards.get(name)
    pieces = _seen(chunks(disk, path), see)
    record = writer.write(f"{ACTOR}/{name}", pieces, len(header.tensors) if header else 0)
    require_unchanged(disk, export, name, record.size)
    return record


def require_unchanged(disk: Disk, export: Export, name: str, size: int) -> None:
    """Return if a file is what it was when the export was examined, and `size` bytes of it were read."""
    path = f"{export.directory}/{name}"
    if disk.stat(path) != export.stats[name] or size != export.stats[name].size:
        raise CorruptDataError(
            "the file changed while it was copied", path=path, hint="publish it once its writer is done"
        )


def _copy(
    writer: StepWriter, disk: Disk, export: Export, name: str, *, check: bool
) -> tuple[FileRecord, TileHasher]:
    """Copy a shard and check that it is finite; return its record and its tiles."""
    header, path = export.shards[name], f"{export.directory}/{name}"
    finite, tiled = FiniteCheck(header, path), TileHasher(header)

    def see(piece: bytes) -> None:
        if check:
            finite.feed(piece)
        tiled.feed(piece)

    return copy_file(writer, disk, export, name, see), tiled


def _seen(pieces: Iterator[bytes], see: Callable[[bytes], None]) -> Iterator[bytes]:
    for piece in pieces:
        see(piece)
        yield piece
