"""Publishes a directory of safetensors as a delta of an earlier step, or whole where a delta does not pay."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from syncd.client.heartbeat import leasing
from syncd.errors import CorruptDataError, StorageError, TryAgainError, UsageError
from syncd.protocol.delta import ENCODING, DeltaTable, Target
from syncd.protocol.digest import DEFAULT, digest_file, hasher
from syncd.protocol.disk import Disk
from syncd.protocol.layout import ACTOR, Job, delta_name
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import Manifest
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import Changes, FileRecord
from syncd.protocol.tile_digests import shard_roots
from syncd.protocol.writer import StepWriter
from syncd.publishing import (
    Content,
    Export,
    copy_file,
    publish_export,
    publish_written,
    require_unchanged,
)
from syncd.publishing.finite import FiniteCheck
from syncd.transports.delta.chain import Chain, explain_removal
from syncd.transports.delta.container import NewContainer
from syncd.transports.delta.keyframes import (
    KEYFRAME_EVERY,
    LARGEST_SHARE,
    chain_problem,
    is_too_large,
)
from syncd.transports.delta.ulp1 import encode
from syncd.transports.files.storage import ChainLength


class DeltaPublished(NamedTuple):
    """What was published: the manifest, and why the step is whole, empty where it is a delta."""

    manifest: Manifest
    why_whole: str


def publish_delta(
    job: Job,
    step: int,
    disk: Disk,
    export: Export,
    parent: int,
    *,
    rewind: bool = False,
    allow_nonfinite: bool = False,
    probe: Probe | None = None,
    before_seal: Callable[[], None] = lambda: None,
) -> DeltaPublished:
    """Publish an export as the changes of an earlier step; whole, and with the reason, where that is not possible.

    The files of step `parent` are read through its chain, and checked. The other arguments and errors are those of
    `syncd.publishing.publish_export`.
    """
    if parent >= step:
        raise UsageError(f"step {parent} is not earlier than step {step}", hint="name an earlier step")
    if export.kind != "weights":
        raise UsageError("an adapter is published whole", path=export.directory, hint="omit --delta-from")
    try:
        with _leased(job, parent), explain_removal(job, parent):
            write = _DeltaWriter(job, parent, disk, export, check=not allow_nonfinite).write
            manifest = publish_written(
                job, step, disk, export, write, rewind=rewind, probe=probe, before_seal=before_seal
            )
        return DeltaPublished(manifest, "" if manifest.delta else "it was sealed whole before")
    except _WholeError as error:
        why = str(error)
    whole = publish_export(
        job,
        step,
        disk,
        export,
        rewind=rewind,
        allow_nonfinite=allow_nonfinite,
        probe=probe,
        before_seal=before_seal,
    )
    return DeltaPublished(whole, why)


class _WholeError(Exception):
    """The step must be whole, for the reason that is the text."""


@contextlib.contextmanager
def _leased(job: Job, parent: int) -> Iterator[None]:
    """Keep the parent, and by it its chain, until the step is announced."""
    with contextlib.ExitStack() as lease:
        try:
            lease.enter_context(leasing(job, [parent]))
        except StorageError as error:
            raise _WholeError(f"the lease on step {parent} cannot be written: {error}") from error
        yield


def _why_whole(chain: Chain, disk: Disk, export: Export) -> str:
    """Return why the next step must not be a delta of this one, empty where it may be."""
    parent, deltas = chain.manifest, chain.deltas
    length = ChainLength(chain.manifests[-1].step, len(deltas), sum(delta.size for delta in deltas))
    if problem := chain_problem(length, parent.whole_size, KEYFRAME_EVERY):
        return problem
    shards = {record.name.removeprefix(f"{ACTOR}/"): record for record in parent.whole_shards}
    if shards.keys() != export.shards.keys():
        other = min(shards.keys() ^ export.shards.keys())
        return f"its shard files are not those of step {parent.step}: {other}"
    return next(filter(None, (_other_layout(chain, disk, export, shards, name) for name in shards)), "")


def _other_layout(
    chain: Chain, disk: Disk, export: Export, shards: Mapping[str, FileRecord], name: str
) -> str:
    """Return that a shard has another header than the parent's has, empty where they are the same."""
    if disk.read_at(f"{export.directory}/{name}", 0, export.shards[name].data_offset) == chain.head(
        shards[name]
    ):
        return ""
    return f"the header of {name} is not that of step {chain.manifest.step}: other tensors, shapes or dtypes"


class _DeltaWriter:
    """Writes an export as a delta of step `parent` into an attempt; with `check`, its weights must be finite."""

    def __init__(self, job: Job, parent: int, disk: Disk, export: Export, *, check: bool) -> None:
        self._job, self._disk, self._export, self._check = job, disk, export, check
        self._chain = Chain(job, read_chain(job, parent))
        self._whole_size = self._chain.manifest.whole_size
        if why := _why_whole(self._chain, disk, export):
            raise _WholeError(why)

    def write(self, writer: StepWriter) -> Content:
        parent = self._chain.manifest
        records = parent.whole_shards
        targets = tuple(Target(record.name, record.size) for record in records)
        with NewContainer(targets) as container:
            shards = tuple(self._encode(container, number, record) for number, record in enumerate(records))
            stored = writer.write(f"{ACTOR}/{delta_name(1, 1)}", container.pieces(), tensors=3)
            frames = container.frames
        files = tuple(map(self._record, self._export.files))
        new = [
            copy_file(writer, self._disk, self._export, record.name.removeprefix(f"{ACTOR}/"))
            for record in files
            if record not in parent.whole_files
        ]
        if read_chain(self._job, parent.step)[0].digest != parent.digest:
            raise TryAgainError(f"step {parent.step} was written again while its changes were stored")
        roots = shard_roots([DeltaTable(targets, tuple(frames), 0)])
        counts = sum(frame.changed for frame in frames), sum(frame.words for frame in frames)
        changes = Changes(parent.step, parent.digest, ENCODING, *counts, shards, files)
        return Content([stored], new, "delta", list(roots.values()), changes)

    def _encode(self, container: NewContainer, number: int, record: FileRecord) -> FileRecord:
        """Add the frames of one shard; return the record that the shard would have in a whole step."""
        name = record.name.removeprefix(f"{ACTOR}/")
        path, header = f"{self._export.directory}/{name}", self._export.shards[name]
        state, finite = hasher(), FiniteCheck(header, path)
        for tile, old in self._chain.tiles(record):
            new = self._disk.read_at(path, tile.offset, tile.length)
            if len(new) != tile.length:
                raise CorruptDataError("cut short while it was read", path=path)
            if self._check:
                finite.feed(new)
            state.update(new)
            container.add(encode(old, new, width=tile.width, offset=tile.offset, target=number))
            if is_too_large(container.stored, self._whole_size):
                raise _WholeError(f"its changes take more than {LARGEST_SHARE:.0%} of a whole step")
        require_unchanged(self._disk, self._export, name, record.size)
        return record._replace(digest=f"{DEFAULT}:{state.hexdigest()}")

    def _record(self, name: str) -> FileRecord:
        digest, size = digest_file(self._disk, f"{self._export.directory}/{name}")
        require_unchanged(self._disk, self._export, name, size)
        return FileRecord(f"{ACTOR}/{name}", size, digest)
