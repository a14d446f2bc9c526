"""A step as its chain makes it: each tile from the keyframe, through every delta, proved by digests."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from syncd.errors import CorruptDataError, TryAgainError
from syncd.protocol.delta import Frame, Tile, tiles
from syncd.protocol.digest import hasher, name_of
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job, parse_step_name
from syncd.protocol.lineage import check_tables, containers, header_problem, read_chain
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord, record_chunks
from syncd.protocol.safetensors import Header, read_header
from syncd.transports.delta.ulp1 import apply, with_streams


@contextlib.contextmanager
def explain_removal(job: Job, step: int) -> Iterator[None]:
    """Say that a step was removed while it was read, where that is what made a read fail.

    Raises:
        TryAgainError: A file in a step of the job is missing.
    """
    try:
        yield
    except MISSING as error:
        place = str(error.filename).removeprefix(f"{job.root}/").partition("/")[0]
        if parse_step_name(place) is None:
            raise
        hint = f"syncd pin {job.root} {step}  # keeps its chain, too"
        message = f"a step of the chain of step {step} was removed while it was read"
        raise TryAgainError(message, path=error.filename, hint=hint) from None


class _Link(NamedTuple):
    """What one delta says of one file: its container, and its frames with the place of their streams."""

    container: str
    frames: list[tuple[Frame, int]]


class Chain:
    """The files of a step of kind weights or delta, whole.

    Everything that is read may be damaged: nothing is returned as good before its digest was compared.

    Args:
        job: The job.
        step: The step.
        shortcut: Make the step by its shortcut, from its parent, instead of reading its shards.

    Raises:
        UsageError: There is no such step, it is of another kind, or it has no shortcut where one is asked for.
        CorruptDataError: A link is missing, or does not fit the next; a table is damaged.
    """

    def __init__(self, job: Job, step: int, *, shortcut: bool = False) -> None:
        self._job = job
        self.manifests = read_chain(job, step, shortcut=shortcut)
        """The step first, its keyframe last."""
        self._links: dict[str, list[_Link]] = {}
        for manifest in reversed(self.deltas):
            self._add_links(manifest)

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the step."""
        return self.manifests[0]

    @property
    def deltas(self) -> list[Manifest]:
        """Return the manifests that are not the keyframe's, the step first."""
        return self.manifests[:-1]

    def head(self, record: FileRecord) -> bytes:
        """Return the bytes of a shard file before its data: those of the keyframe, since no delta changes them."""
        return self._read(self._keyframe_path(record), 0, self._header(record).data_offset)

    def tiles(self, record: FileRecord) -> Iterator[tuple[Tile, bytearray]]:
        """Yield a shard file of the step tile by tile, in order.

        A tile may be of damaged data until the iterator ends without an error: then the file has its digest.

        Raises:
            CorruptDataError: A tile is not what a frame changes, or the file is not what the step says.
        """
        links, path = self._links.get(record.name, []), self._keyframe_path(record)
        state, cut = hasher(name := name_of(record.digest)), list(tiles(self._header(record)))
        for link in links:
            if [frame.tile for frame, _ in link.frames] != cut:
                raise CorruptDataError(f"the frames are not the tiles of {record.name}", path=link.container)
        for number, tile in enumerate(cut):
            data = bytearray(self._read(path, tile.offset, tile.length))
            for link in links:
                self._apply(link, number, data)
            state.update(memoryview(data))
            yield tile, data
        if f"{name}:{state.hexdigest()}" != record.digest:
            message = f"the chain does not make the {record.name} that step {self.manifest.step} says"
            raise CorruptDataError(message, path=path)

    def file_pieces(self, record: FileRecord) -> Iterator[bytes]:
        """Yield a file beside the weights, from the step or the link that stores it.

        Raises:
            CorruptDataError: No link stores it, or its content is not that of its record.
        """
        holders = (manifest.step for manifest in self.manifests if record in manifest.files)
        step = next(holders, None)
        if step is None:
            raise CorruptDataError(f"no step of the chain has {record.name}")
        yield from record_chunks(self._job.disk, f"{self._job.step(step)}/{record.name}", record)

    def _add_links(self, manifest: Manifest) -> None:
        path = self._job.step(manifest.step)
        if manifest.changes is not None and (problem := header_problem(manifest.changes)):
            raise CorruptDataError(f"step {manifest.step} is {problem}", path=path)
        tables = containers(self._job, manifest)
        check_tables(manifest, tables)
        for record, table in zip(manifest.containers, tables, strict=True):
            for target, frames in zip(table.targets, table.by_target(), strict=True):
                self._links.setdefault(target.name, []).append(_Link(f"{path}/{record.name}", frames))

    def _apply(self, link: _Link, number: int, data: bytearray) -> None:
        frame, at = link.frames[number]
        if frame.stored:
            streams = self._read(link.container, at, frame.stored)
            apply(data, with_streams(frame, streams, link.container))

    def _header(self, record: FileRecord) -> Header:
        return read_header(self._job.disk, self._keyframe_path(record))

    def _keyframe_path(self, record: FileRecord) -> str:
        return f"{self._job.step(self.manifests[-1].step)}/{record.name}"

    def _read(self, path: str, offset: int, length: int) -> bytes:
        data = self._job.disk.read_at(path, offset, length)
        if len(data) != length:
            raise CorruptDataError("cut short while it was read", path=path)
        return data
