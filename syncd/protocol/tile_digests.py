"""Roots: digests over the tiles of a step's shard files, by which a delta and its parent are compared.

The root of a file is the xxh3_128 over place and digest of each of its tiles; that of a step is over those of its
files. docs/delta-format.md has the form.
"""

import struct
from collections.abc import Iterable, Mapping

import xxhash

from syncd.protocol.delta import TILE, DeltaTable, Target, Tile, tiles
from syncd.protocol.digest import digest_bytes
from syncd.protocol.receipt import ShardRoots
from syncd.protocol.safetensors import Header

RECORD = struct.Struct("<QQ16s")  # of one tile: its first byte in the file, its bytes, and their xxh3_128


class FileRoot:
    """The root of one file: a digest over place and digest of each of its tiles, in order."""

    def __init__(self) -> None:
        self._records = bytearray()

    def add_tile(self, offset: int, length: int, digest: bytes) -> None:
        """Add the next tile, with the xxh3_128 of its bytes."""
        self._records += RECORD.pack(offset, length, digest)

    @property
    def records(self) -> bytes:
        """Return the place and digest of each tile, one after the other: what the root is the digest of."""
        return bytes(self._records)

    def hexdigest(self) -> str:
        return root_of_records(self._records)


def root_of_records(records: bytes | bytearray) -> str:
    return xxhash.xxh3_128_hexdigest(records)


class TileHasher:
    """Computes the root of a file whose bytes come in pieces."""

    def __init__(self, header: Header) -> None:
        self._tiles, self._root = tiles(header), FileRoot()
        self._tile, self._left, self._state = Tile(0, 0, 1), 0, xxhash.xxh3_128()

    def feed(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while view:
            if not self._left:
                self._begin()
            part, view = view[: self._left], view[self._left :]
            self._state.update(part)
            self._left -= len(part)
            if not self._left:
                self._root.add_tile(self._tile.offset, self._tile.length, self._state.digest())

    def hexdigest(self) -> str:
        """Return the root of the file, once all of its bytes were given."""
        return self._root.hexdigest()

    @property
    def records(self) -> bytes:
        return self._root.records

    def _begin(self) -> None:
        self._tile = next(
            self._tiles, Tile(0, TILE, 1)
        )  # beyond its end, whoever reads it notices by the size
        self._left, self._state = self._tile.length, xxhash.xxh3_128()


def step_root(files: Mapping[Target, str]) -> str:
    """Return the root of a step as `xxh3_128:<hex>`: over root, size and name of each of its shard files, by name."""
    lines = (f"{root} {target.size} {target.name}\n" for target, root in sorted(files.items()))
    return digest_bytes("".join(lines).encode())


def shard_roots(tables: Iterable[DeltaTable]) -> dict[Target, ShardRoots]:
    """Return the roots of the files that containers make, from the tables of the containers."""
    roots = dict[Target, ShardRoots]()
    for table in tables:
        of_files = [(FileRoot(), FileRoot()) for _ in table.targets]
        for frame in table.frames:
            for root, digest in zip(of_files[frame.target], (frame.before, frame.after), strict=True):
                root.add_tile(frame.offset, frame.length, digest)
        for target, (before, after) in zip(table.targets, of_files, strict=True):
            roots[target] = ShardRoots(target.name, after.hexdigest(), before.hexdigest())
    return roots


def roots_of(tables: Iterable[DeltaTable]) -> tuple[str, str]:
    """Return the roots before and after of a delta, from the tables of all its containers."""
    roots = shard_roots(tables)
    before = step_root({target: shard.before for target, shard in roots.items()})
    return before, step_root({target: shard.after for target, shard in roots.items()})
