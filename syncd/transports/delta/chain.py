"""A step as its chain makes it: each tile from where the chain begins, through every delta, proved by digests."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import xxhash

from syncd.errors import CorruptDataError, TryAgainError
from syncd.protocol.delta import Frame, Tile, tiles
from syncd.protocol.digest import digest_file, hasher, name_of
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.layout import ACTOR, Job, parse_step_name
from syncd.protocol.lineage import check_tables, containers, header_problem
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord, record_chunks
from syncd.protocol.safetensors import Header, read_header
from syncd.transports.delta.ulp1 import OtherTileError, apply, with_streams

_AHEAD = 4 << 20  # bytes of streams that are read at once for one file, over all its links

_LEAST_AHEAD = 64 << 10


class BaseDamagedError(CorruptDataError):
    """The copy that a chain begins with is not the step that it is called."""


@contextlib.contextmanager
def explain_removal(job: Job, step: int) -> Iterator[None]:
    """Say that a step was removed while it was read, where that is what made a read fail."""
    try:
        yield
    except MISSING as error:
        name = str(error.filename).removeprefix(f"{job.root}/").partition("/")[0]
        if parse_step_name(name) is None:
            raise
        hint = f"syncd pin {job.root} {step}  # keeps its chain, too"
        message = f"a step of the chain of step {step} was removed while it was read"
        raise TryAgainError(message, path=error.filename, hint=hint) from None


@dataclass(frozen=True, slots=True)
class WholeFiles:
    disk: Disk  # their file system
    directory: str  # what engines load of that step
    # Whether they are a copy of this host; else they are those of the keyframe in the job.
    is_copy: bool = False

    def path(self, record: FileRecord) -> str:
        return f"{self.directory}/{record.name.removeprefix(f'{ACTOR}/')}"

    def read(self, record: FileRecord, tile: Tile, memory: memoryview) -> None:
        memory[:] = read_range(self.disk, self.path(record), tile.offset, tile.length)


class _Link(NamedTuple):
    """What one delta says of one file: its container, and its frames with the place of their streams."""

    container: str
    frames: list[tuple[Frame, int]]


class Chain:
    """The files of a step of kind weights or delta, whole.

    Everything that is read may be damaged: nothing is returned as good before its digest was compared.

    Args:
        manifests: Of the step, and of what it is stored as changes of: the step first (`lineage.read_chain`).
        base: A copy of the step that the last of them changes; None if the last of them is the keyframe, whose files
            are read from the job.
    """

    def __init__(self, job: Job, manifests: Sequence[Manifest], base: WholeFiles | None = None) -> None:
        self._job, self.manifests = job, manifests
        self.deltas = manifests if base else manifests[:-1]
        """The manifests of the steps whose changes are applied, the step first."""
        self._base = base or WholeFiles(job.disk, f"{job.step(manifests[-1].step)}/{ACTOR}")
        self._links: dict[str, list[_Link]] = {}
        for manifest in reversed(self.deltas):
            self._add_links(manifest)

    @property
    def manifest(self) -> Manifest:
        return self.manifests[0]

    def head(self, record: FileRecord) -> bytes:
        """Return the bytes of a shard file before its data: those of the first step, since no delta changes them."""
        base = self._base
        return read_range(base.disk, base.path(record), 0, self._header(record).data_offset)

    def tiles(self, record: FileRecord) -> Iterator[tuple[Tile, memoryview]]:
        """Yield a shard file of the step tile by tile, in order, each in the same memory: fresh memory is slow.

        A tile may be of damaged data until the iterator ends without an error: then the file has its digest.
        """
        links, path = self._links.get(record.name, []), self._base.path(record)
        state, cut = hasher(name := name_of(record.digest)), self._cut(record, links)
        for link in links:
            if [frame.tile for frame, _ in link.frames] != cut:
                raise CorruptDataError(f"the frames are not the tiles of {record.name}", path=link.container)
        readers = [_StreamReader(self._job.disk, link, len(links)) for link in links]
        memory = memoryview(bytearray(max((tile.length for tile in cut), default=0)))
        for number, tile in enumerate(cut):
            data = memory[: tile.length]
            self._read_base(record, tile, data)
            for depth, reader in enumerate(readers):
                self._apply(reader, number, data, "" if depth else path)
            state.update(data)
            yield tile, data
        if f"{name}:{state.hexdigest()}" != record.digest:
            message = f"the chain does not produce the {record.name} that step {self.manifest.step} says"
            raise CorruptDataError(message, path=path)

    def file_pieces(self, record: FileRecord) -> Iterator[bytes]:
        """Yield a file beside the weights: from the copy that has it, else from the step that stores it."""
        if self._copy_has(record):
            yield from record_chunks(self._base.disk, self._base.path(record), record)
            return
        holders = (manifest.step for manifest in self.manifests if record in manifest.files)
        step = next(holders, None)
        if step is None and self._base.is_copy:
            self._blame_base(self._base.path(record), f"{record.name} has another content")
        if step is None:
            raise CorruptDataError(f"no step of the chain has {record.name}")
        yield from record_chunks(self._job.disk, f"{self._job.step(step)}/{record.name}", record)

    def _copy_has(self, record: FileRecord) -> bool:
        if not self._base.is_copy:
            return False
        with contextlib.suppress(*MISSING, CorruptDataError):
            content = digest_file(self._base.disk, self._base.path(record), name_of(record.digest))
            return content == (record.digest, record.size)
        return False

    def _add_links(self, manifest: Manifest) -> None:
        path = self._job.step(manifest.step)
        if manifest.changes is not None and (problem := header_problem(manifest.changes)):
            raise CorruptDataError(f"step {manifest.step} is {problem}", path=path)
        tables = containers(self._job, manifest)
        check_tables(manifest, tables)
        for record, table in zip(manifest.containers, tables, strict=True):
            for target, frames in zip(table.targets, table.by_target(), strict=True):
                self._links.setdefault(target.name, []).append(_Link(f"{path}/{record.name}", frames))

    def _cut(self, record: FileRecord, links: Sequence[_Link]) -> list[Tile]:
        """Return the tiles of a file. Roots prove those of frames; the header of a copy may be damaged."""
        if self._base.is_copy:
            return [frame.tile for frame, _ in links[0].frames]
        return list(tiles(self._header(record)))

    def _read_base(self, record: FileRecord, tile: Tile, memory: memoryview) -> None:
        try:
            self._base.read(record, tile, memory)
        except (*MISSING, CorruptDataError) as error:
            if self._base.is_copy:
                self._blame_base(self._base.path(record), str(error))
            raise
        except OSError as error:
            if self._base.is_copy and error.errno == errno.EIO:
                self._blame_base(self._base.path(record), str(error))
            raise

    def _apply(self, reader: "_StreamReader", number: int, data: memoryview, base: str) -> None:
        """Apply one frame to a tile; `base` is the path of the file if the tile comes from it, else empty."""
        frame, _ = reader.link.frames[number]
        try:
            if frame.stored:
                apply(data, with_streams(frame, reader.read(number), reader.link.container))
            elif base:
                _require_unchanged(data, frame)
        except OtherTileError as error:
            if base and self._base.is_copy:
                self._blame_base(base, error.message)
            raise CorruptDataError(error.message, path=base or reader.link.container) from None

    def _blame_base(self, path: str, why: str) -> NoReturn:
        raise BaseDamagedError(
            f"the copy that the changes start from is another one: {why}", path=path
        ) from None

    def _header(self, record: FileRecord) -> Header:
        return read_header(self._base.disk, self._base.path(record))


class _StreamReader:
    """Reads the streams of one link of a file, frame after frame; `links` of the file are read beside each other."""

    def __init__(self, disk: Disk, link: _Link, links: int) -> None:
        self._disk, self.link = disk, link
        self._ahead = max(_AHEAD // links, _LEAST_AHEAD)
        last, at = link.frames[-1]
        self._end = at + last.stored
        self._begin, self._data = 0, b""

    def read(self, number: int) -> memoryview:
        """Return the streams of a frame; its number is never lower than that of the call before."""
        frame, at = self.link.frames[number]
        if at + frame.stored > self._begin + len(self._data):
            length = max(frame.stored, min(self._ahead, self._end - at))
            self._begin, self._data = at, read_range(self._disk, self.link.container, at, length)
        return memoryview(self._data)[at - self._begin :][: frame.stored]


def _require_unchanged(data: memoryview, frame: Frame) -> None:
    if xxhash.xxh3_128_digest(data) != frame.after:
        raise OtherTileError(f"the tile at byte {frame.offset} is not what the chain begins with")


def read_range(disk: Disk, path: str, offset: int, length: int) -> bytes:
    data = disk.read_at(path, offset, length)
    if len(data) != length:
        raise CorruptDataError("cut short while it was read", path=path)
    return data
