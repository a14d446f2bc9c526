"""The tables of tiles beside the receipts of a step: place and digest of each tile of its shard files.

`.receipts/00001-of-00004.tiles` has those of the files of one writer. A reader that gets a step in pieces from
several places proves each piece by them. No manifest lists these files: the root in the manifest is a digest of
what they hold, so a table that is damaged is found, and a step without one is whole all the same. A trainer writes
them where it keeps the step, to store the next one as changes of it, or an explorer has `READS_TILES` in `reads`.

One line of JSON (`protocol`, `files`: name and number of tiles of each), then all records of tiles in that order.
"""

import contextlib
from collections.abc import Iterator, Mapping

from syncd.errors import CorruptDataError
from syncd.protocol.delta import Target
from syncd.protocol.disk import MISSING, Disk, list_if_there
from syncd.protocol.documents import decode, encode
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import receipts_directory
from syncd.protocol.tile_digests import RECORD, root_of_records, step_root

SUFFIX = ".tiles"
READS_TILES = "tiles"  # what an explorer whose host divides steps with others has in `reads`
TABLE_LIMIT = 1 << 28  # the largest table that is read, in bytes: of 64 TB

TileRecords = Mapping[str, bytes]
"""The records of the tiles of files, by the name of the file relative to the step."""


def encode_tiles(records: TileRecords) -> bytes:
    names = sorted(records)
    files = [{"name": name, "tiles": len(records[name]) // RECORD.size} for name in names]
    return encode({"files": files}) + b"".join(records[name] for name in names)


def decode_tiles(data: bytes, path: str) -> dict[str, bytes]:
    head, _, body = data.partition(b"\n")
    records, at = dict[str, bytes](), 0
    for file in decode(head, path).records("files"):
        length = file.integer("tiles") * RECORD.size
        records[file.text("name")] = body[at : at + length]
        at += length
    if at != len(body):
        raise CorruptDataError("a table of tiles with another number of them", path=path)
    return records


def read_tiles(disk: Disk, step_path: str, manifest: Manifest) -> dict[str, bytes] | None:
    """Return the records of all tiles of a step, proven by the root of its manifest; None without them."""
    directory, records = receipts_directory(step_path), dict[str, bytes]()
    for entry in list_if_there(disk, directory) if manifest.root else ():
        if entry.kind == "file" and entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
            path = f"{directory}/{entry.name}"
            with contextlib.suppress(*MISSING, CorruptDataError):
                records |= decode_tiles(disk.read(path, TABLE_LIMIT), path)
    return records if is_proven(records, manifest) else None


def is_proven(records: TileRecords, manifest: Manifest) -> bool:
    """Return whether the root of a manifest is that of these tiles, and they cover every byte of its shard files."""
    shards = manifest.whole_shards
    if not shards or any(record.name not in records for record in shards):
        return False
    roots = {Target(record.name, record.size): root_of_records(records[record.name]) for record in shards}
    root = manifest.delta.root_after if manifest.delta else manifest.root
    return step_root(roots) == root and all(_covers(records[name], size) for name, size in roots)


def tiles_of(records: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield place, bytes and digest of each tile."""
    yield from RECORD.iter_unpack(records)


def _covers(records: bytes, size: int) -> bool:
    at = 0
    for offset, length, _ in tiles_of(records):
        if offset != at or length <= 0:
            return False
        at += length
    return at == size
