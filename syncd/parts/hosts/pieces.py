"""The pieces that a step is divided into, and how each is proven.

Of whole shard files a piece is a tile, whose digest is in a table that the manifest's root proves. Of containers
it is a run of frames: each has a checksum over its record and its streams, and the table of all records is the
container's head, which every host reads from the file system. Of every other file the piece is the whole file,
proven by its record.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from syncd.errors import CorruptDataError
from syncd.protocol.delta import TILE, DeltaTable, encode_frame_record
from syncd.protocol.digest import Hasher, hasher, name_of
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.layout import Job
from syncd.protocol.lineage import check_tables, containers
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.tile_digests import FileRoot
from syncd.protocol.tile_table import is_proven, read_tiles, tiles_of
from syncd.transports.files.copy_files import THREADS

_RUN = TILE // 8
"""Bytes of frames that are one piece: containers are small, and every host is to have a share."""


class Part(NamedTuple):
    """Bytes of a piece that have a digest of their own."""

    length: int
    kind: str  # the digest's name; frame for a frame's checksum, whose record comes before its streams
    head: bytes
    digest: str

    def begin(self) -> Hasher:
        if self.kind != "frame":
            return hasher(self.kind)
        state = xxhash.xxh32()
        state.update(self.head)
        return state


class Piece(NamedTuple):
    """What one host reads from the file system and others get from it."""

    file: int  # the number of its file
    offset: int
    length: int
    parts: tuple[Part, ...]


class PieceProof:
    """Compares a piece that comes in chunks with its digests."""

    def __init__(self, piece: Piece) -> None:
        self._parts = iter(piece.parts)
        self._part, self._left = Part(0, "", b"", ""), 0
        self._state: Hasher | None = None
        self._good = True

    def feed(self, chunk: memoryview) -> None:
        while chunk:
            if not self._left:
                self._end_part()
                following = next(self._parts, None)
                if following is None:
                    self._good = False  # more bytes than the piece has
                    return
                self._part = following
                self._left, self._state = self._part.length, self._part.begin()
            part, chunk = chunk[: self._left], chunk[self._left :]
            assert self._state is not None, "a part has begun"
            self._state.update(part)
            self._left -= len(part)

    def is_proven(self) -> bool:
        """Return whether every part matches, once all bytes were given."""
        self._end_part()
        return self._good and not self._left and next(self._parts, None) is None

    def _end_part(self) -> None:
        if self._state is not None:
            self._good &= self._state.hexdigest() == self._part.digest
            self._state = None


class PlannedFile(NamedTuple):
    """A file that is divided."""

    name: str  # relative to the directory that is made
    path: str  # where the file system has it
    size: int


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """How files are divided; the same on every host."""

    files: tuple[PlannedFile, ...]  # sorted by name
    pieces: tuple[Piece, ...]
    # What every host reads itself: the file, the first byte, the bytes.
    own: tuple[tuple[int, int, int], ...] = ()

    @property
    def size(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def has_whole_files(self) -> bool:
        """Return whether a large file is one piece, so that nobody can pass it on before all of it was read."""
        return any(piece.length > TILE for piece in self.pieces)


def plan_copy(directory: str, records: Sequence[FileRecord], tiles: dict[str, bytes] | None) -> PiecePlan:
    """Return how the files of a directory are divided: tiles first, so their numbers do not depend on other files.

    Args:
        directory: Where the file system has them.
        records: Of the files; their names are relative to it.
        tiles: The records of the tiles of shard files, proven, by the name of the file; None without.
    """
    files = _files(directory, records)
    by_name = {record.name: record for record in records}
    pieces = list[Piece]()
    for number, file in enumerate(files):
        record, table = by_name[file.name], (tiles or {}).get(file.name)
        if table is not None:
            pieces += [
                Piece(number, offset, length, (Part(length, "xxh3_128", b"", digest.hex()),))
                for offset, length, digest in tiles_of(table)
            ]
        elif file.size:
            kind = name_of(record.digest, file.path)
            part = Part(file.size, kind, b"", record.digest.partition(":")[2])
            pieces.append(Piece(number, 0, file.size, (part,)))
    # A stable order: a host that copies early knows the tiles alone (`HostsReader.share`).
    return PiecePlan(
        files, tuple(sorted(pieces, key=lambda piece: files[piece.file].name not in (tiles or {})))
    )


def plan_containers(path: str, records: Sequence[FileRecord], tables: Sequence[DeltaTable]) -> PiecePlan:
    """Return how the containers of a step are divided.

    Args:
        path: The directory of the step.
        records: Of the containers; their names are relative to it.
        tables: Of the containers, in the same order.
    """
    files = _files(path, records)
    numbers = {file.name: number for number, file in enumerate(files)}
    pieces, own = list[Piece](), list[tuple[int, int, int]]()
    for record, table in zip(records, tables, strict=True):
        number = numbers[record.name]
        pieces += _runs(number, table)
        end = table.streams_at + sum(frame.stored for frame in table.frames)
        own += [(number, 0, table.streams_at), (number, end, record.size - end)]
    return PiecePlan(files, tuple(_woven(sorted(pieces))), tuple(part for part in own if part[2]))


def _woven(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces of all quarters in turn: several files are built of them at once."""
    quarter = -(-len(pieces) // THREADS)
    for first in range(quarter):
        yield from pieces[first::quarter]


def _runs(number: int, table: DeltaTable) -> Iterator[Piece]:
    at, length, parts = table.streams_at, 0, list[Part]()
    for frame in table.frames:
        if frame.stored:
            head = encode_frame_record(frame._replace(checksum=0))
            parts.append(Part(frame.stored, "frame", head, f"{frame.checksum:08x}"))
            length += frame.stored
        if length >= _RUN:
            yield Piece(number, at, length, tuple(parts))
            at, length, parts = at + length, 0, []
    if parts:
        yield Piece(number, at, length, tuple(parts))


def _files(directory: str, records: Iterable[FileRecord]) -> tuple[PlannedFile, ...]:
    files = (PlannedFile(record.name, f"{directory}/{record.name}", record.size) for record in records)
    return tuple(sorted(files))


def stored_tiles(disk: Disk, directory: str, manifest: Manifest) -> dict[str, bytes] | None:
    """Return the proven tiles of shard files that a step stores, by their names in its directory; None without."""
    step_path = os.path.dirname(directory)
    with contextlib.suppress(*MISSING, CorruptDataError):
        return _below(directory, read_tiles(disk, step_path, manifest))
    return None


def made_tiles(job: Job, directory: str, manifest: Manifest) -> dict[str, bytes] | None:
    """Return the proven tiles of the shard files that the changes of a step make; None if they cannot be read."""
    try:
        tables = containers(job, manifest)
        check_tables(manifest, tables)
    except (*MISSING, CorruptDataError):
        return None
    tiles = dict[str, bytes]()
    for table in tables:
        for target, frames in zip(table.targets, table.by_target(), strict=True):
            root = FileRoot()
            for frame, _ in frames:
                root.add_tile(frame.offset, frame.length, frame.after)
            tiles[target.name] = root.records
    return _below(directory, tiles) if is_proven(tiles, manifest) else None


def _below(directory: str, tiles: dict[str, bytes] | None) -> dict[str, bytes] | None:
    prefix = f"{os.path.basename(directory)}/"
    return tiles and {name.removeprefix(prefix): records for name, records in tiles.items()}
