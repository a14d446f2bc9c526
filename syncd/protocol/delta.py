"""Deltas on disk: how files are cut into tiles, and the frames of a container.

A delta turns the shard files of its parent, byte for byte, into those of the step. Each file is cut into tiles, the
same for the parent and for the step. A frame is what a delta says of one tile: the digest of its bytes before and
after, and how to get from one to the other. docs/delta-format.md has the format with its offsets. Everything here is
bounded by the sizes of the files, and no weight is read.
"""

import json
import os
import re
import shlex
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk
from syncd.protocol.documents import parse_json
from syncd.protocol.layout import is_relative_name, parse_step_name
from syncd.protocol.safetensors import DTYPE_BITS, Header, Progress, Tensor, read_header

ENCODING = "ulp1"  # the name of the encoding that this release writes and reads

TILE = 8 << 20
"""The most bytes of a tile. Part of the format: roots of two steps are compared, so their tiles are the same."""

SAME, ULP_SORTED, ULP, XOR = range(4)
"""Methods of a frame: nothing changed; distances in the order of the old exponents, or of the words; XOR."""

RECORD = struct.Struct("<IBBHQIII4II16s16s")
"""One frame of a table: target, width, method, zero, offset, length, changed, bytes of the first stream before it was
compressed, stored bytes of each stream, checksum, digests before and after."""

FRAME_LIMIT = 1 << 20  # the most frames of one container: 8 TiB of full tiles
TARGETS_LIMIT = 16 << 20  # the longest list of targets, in bytes

_WIDTHS = (1, 2, 4, 8)
_READ = 4 << 20
_PARTS = ("targets", "frames", "streams")
_PART = re.compile(r"(targets|frames|streams)-[0-9]{5,9}", re.ASCII)


class Tile(NamedTuple):
    """A piece of a file: its first byte, its bytes, and the bytes of each word in it."""

    offset: int
    length: int
    width: int


class Frame(NamedTuple):
    target: int  # the number of the file in the container's list of targets
    width: int  # bytes of a word: 1, 2, 4 or 8
    method: int  # SAME, ULP_SORTED, ULP or XOR
    offset: int  # the first byte of the tile in the file
    length: int  # bytes of the tile
    changed: int  # words that changed
    gaps: int  # bytes of the first stream once it is decompressed
    streams: tuple[int, int, int, int]  # stored bytes of each stream
    checksum: int  # xxh32 of the record, with zero here, and of the streams
    before: bytes  # xxh3_128 of the tile in the parent's file, 16 bytes
    after: bytes  # the same in the file of the step

    @property
    def words(self) -> int:
        return self.length // self.width

    @property
    def stored(self) -> int:
        return sum(self.streams)

    @property
    def tile(self) -> Tile:
        return Tile(self.offset, self.length, self.width)


class Target(NamedTuple):
    """A file that a delta makes: its name relative to the step's directory, and its bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class DeltaTable:
    targets: tuple[Target, ...]  # the files that it makes
    # The frames of all of them, in the order of the targets, then of the bytes; they tile each file.
    frames: tuple[Frame, ...]
    streams_at: int  # where the streams begin, in bytes from the start of the container

    def by_target(self) -> list[list[tuple[Frame, int]]]:
        """Return the frames of each target, each with the place of its streams in the container."""
        frames: list[list[tuple[Frame, int]]] = [[] for _ in self.targets]
        at = self.streams_at
        for frame in self.frames:
            frames[frame.target].append((frame, at))
            at += frame.stored
        return frames


def tiles(header: Header) -> Iterator[Tile]:
    """Yield the tiles of a safetensors file, in the order of its bytes.

    The header is cut into tiles of words of one byte. Tensors that follow each other and have words of one width are
    one run, which is cut every `TILE` bytes from its beginning.
    """
    yield from _cut(0, header.data_offset, 1)
    begin, end, width = header.data_offset, header.data_offset, 0
    for tensor in header.tensors.values():
        if tensor.end > tensor.start and (tensor_width := word_width(tensor)) != width:
            yield from _cut(begin, end, width)
            begin, width = end, tensor_width
        end = header.data_offset + tensor.end
    yield from _cut(begin, end, width)


def word_width(tensor: Tensor) -> int:
    """Return the bytes of a word of a tensor: of one element, 1 for elements below a byte."""
    return max(1, DTYPE_BITS[tensor.dtype] // 8)


def _cut(begin: int, end: int, width: int) -> Iterator[Tile]:
    for offset in range(begin, end, TILE):
        yield Tile(offset, min(TILE, end - offset), width)


def frame_problem(frame: Frame) -> str:
    """Return what in one frame contradicts itself, empty when nothing does: what bounds each decompression."""
    if frame.width not in _WIDTHS or not 0 < frame.length <= TILE or frame.length % frame.width:
        return "has no such length or width"
    if frame.method == SAME:
        unchanged = frame.before == frame.after and not (frame.changed or frame.gaps or frame.stored)
        return "" if unchanged else "changes something and says that it does not"
    if not 0 < frame.changed <= frame.words or frame.before == frame.after:
        return "changes nothing, or more than there is"
    return "" if _is_bounded(frame) else "has a stream that is too long or too short, or an unknown method"


def _is_bounded(frame: Frame) -> bool:
    first, signs, sizes, escapes = frame.streams
    if frame.method == XOR:
        return first <= frame.length == frame.gaps and signs + sizes + escapes == 0
    return (
        frame.method in (ULP_SORTED, ULP)
        and frame.width == 2  # noqa: PLR2004 - bytes of a word
        and frame.changed <= frame.gaps <= frame.changed + frame.words // 255
        and first <= frame.gaps
        and signs == -(-frame.changed // 8)
        and sizes <= frame.changed
        and escapes <= 2 * frame.changed
    )


def encode_frame_record(frame: Frame) -> bytes:
    head = (frame.target, frame.width, frame.method, 0, frame.offset, frame.length, frame.changed, frame.gaps)
    return RECORD.pack(*head, *frame.streams, frame.checksum, frame.before, frame.after)


def frame_checksum(frame: Frame, streams: Iterable[bytes | memoryview]) -> int:
    """Return the checksum of a frame and its streams: no bit of them is read wrong without notice."""
    state = xxhash.xxh32(encode_frame_record(frame._replace(checksum=0)))
    for stream in streams:
        state.update(stream)
    return state.intdigest()


def decode_frame_record(data: bytes | memoryview, path: object = None) -> Frame:
    if len(data) != RECORD.size:
        raise CorruptDataError(f"a frame's record of {len(data)} bytes", path=path)
    target, width, method, zero, offset, length, changed, gaps, *rest = RECORD.unpack(data)
    streams = rest[0], rest[1], rest[2], rest[3]
    frame = Frame(target, width, method, offset, length, changed, gaps, streams, *rest[4:])
    if problem := "has reserved bits set" if zero else frame_problem(frame):
        raise CorruptDataError(f"the frame at byte {offset} of target {target} {problem}", path=path)
    return frame


def encode_targets(targets: Sequence[Target]) -> bytes:
    return json.dumps([list(target) for target in targets], separators=(",", ":")).encode()


def _decode_targets(data: bytes, path: str) -> tuple[Target, ...]:
    try:
        document = parse_json(data)
    except ValueError:
        document = None
    if not isinstance(document, list) or not all(map(_is_target, document)):
        raise CorruptDataError("not a list of targets", path=path)
    targets = tuple(Target(*item) for item in document)
    if len({target.name for target in targets}) != len(targets):
        raise CorruptDataError("two targets have one name", path=path)
    return targets


def _is_target(item: object) -> bool:
    match item:
        case [str() as name, int() as size] if type(size) is int and size > 0:
            return is_relative_name(name)
    return False


def read_table(disk: Disk, path: str, progress: Progress = lambda: None) -> DeltaTable:
    """Read and check what a container says before its streams: its frames tile each target, and its sums agree."""
    header = read_header(disk, path, progress)
    targets, frames, streams = _parts(header, path)
    if targets.end - targets.start > TARGETS_LIMIT or frames.end - frames.start > FRAME_LIMIT * RECORD.size:
        raise CorruptDataError("the table of frames is too large", path=path)
    named = _decode_targets(_read(disk, path, header, targets, progress), path)
    decoded = _decode_frames(_read(disk, path, header, frames, progress), path, progress)
    _check_tiling(named, decoded, path)
    if sum(frame.stored for frame in decoded) != streams.end - streams.start:
        raise CorruptDataError("the frames and the streams have different sizes", path=path)
    return DeltaTable(named, decoded, header.data_offset + streams.start)


def _is_container(header: Header) -> bool:
    parts = header.tensors.values()
    names = [match[1] for tensor in parts if (match := _PART.fullmatch(tensor.name))]
    return tuple(names) == _PARTS and all(tensor.dtype == "U8" for tensor in parts)


def _parts(header: Header, path: str) -> tuple[Tensor, ...]:
    if not _is_container(header):
        raise CorruptDataError("not the container of a delta", path=path)
    return tuple(header.tensors.values())


def require_weights(header: Header, path: str) -> Header:
    """Return the header of a file of weights; refuse the container of a delta."""
    if not _is_container(header):
        return header
    actor = os.path.dirname(os.path.realpath(path))
    job, name = os.path.split(os.path.dirname(actor))
    step = parse_step_name(name)
    source = "JOB STEP" if step is None else f"{shlex.quote(job)} {step}"
    raise CorruptDataError(
        "changes of an earlier step (a delta), not weights",
        path=path,
        hint=f"syncd materialise {source} --to DIR  # a whole model directory",
    )


def read_weights_header(disk: Disk, path: str, progress: Progress = lambda: None) -> Header:
    """Read and check the header of a file of weights, as `read_header` and `require_weights` do."""
    return require_weights(read_header(disk, path, progress), path)


def _read(disk: Disk, path: str, header: Header, part: Tensor, progress: Progress) -> bytes:
    at, end, pieces = header.data_offset + part.start, header.data_offset + part.end, list[bytes]()
    while at < end and (piece := disk.read_at(path, at, min(_READ, end - at))):
        progress()
        pieces.append(piece)
        at += len(piece)
    if at != end:
        raise CorruptDataError("cut short while it was read", path=path)
    return b"".join(pieces)


def _decode_frames(data: bytes, path: str, progress: Progress) -> tuple[Frame, ...]:
    if len(data) % RECORD.size:
        raise CorruptDataError(f"a table of {len(data)} bytes", path=path)
    view, frames = memoryview(data), list[Frame]()
    for at in range(0, len(data), RECORD.size):
        if at % (RECORD.size << 12) == 0:
            progress()
        frames.append(decode_frame_record(view[at : at + RECORD.size], path))
    return tuple(frames)


def _check_tiling(targets: Sequence[Target], frames: Sequence[Frame], path: str) -> None:
    target, at = -1, 0
    for frame in frames:
        if target < 0 or at == targets[target].size:
            target, at = target + 1, 0
        is_next = target < len(targets) and (frame.target, frame.offset) == (target, at)
        if not is_next or (at := at + frame.length) > targets[target].size:
            message = f"the frame at byte {frame.offset} of target {frame.target} is out of place"
            raise CorruptDataError(message, path=path)
    if target != len(targets) - 1 or (targets and at != targets[target].size):
        raise CorruptDataError("the frames do not cover every byte of every target", path=path)
