"""The encoding `ulp1`: one frame of a delta from the bytes of a tile before and after, and back.

Of words of two bytes a frame stores where they changed and by how many units in the last place (ULP). A weight that
is small changes more often and further, so the sizes of the changes are stored in the order of the old exponents,
which the reader knows: zstd then finds runs of equal sizes. Other words are stored as XOR. Both are compressed with
zstd, level 1, unless that is longer.

A frame has the xxh3_128 of its tile before and after. `apply` writes only if both are right.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta import (
    RECORD,
    SAME,
    TILE,
    ULP,
    ULP_SORTED,
    XOR,
    Frame,
    Tile,
    decode_frame_record,
    encode_frame_record,
    frame_checksum,
)
from syncd.transports.delta.streams import (
    BLOCK,
    Positions,
    Words,
    by_exponent,
    changes,
    distance_streams,
    distances_of,
    gap_bytes,
    packed,
    positions_of,
    unpacked,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
Streams = tuple[bytes, bytes, bytes, bytes]

_SORTED_UP_TO = 1 / 16
"""The share of changed words up to which sorting pays: above, it costs more time than its bytes are worth."""

_DENSE = 1 / 2  # the share of changed words above which XOR is as short

_EMPTY: Streams = (b"", b"", b"", b"")


class OtherTileError(CorruptDataError):
    """A tile is neither what a frame changes nor its result."""


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    frame: Frame  # what the delta says of the tile
    streams: Streams  # as they are stored

    def to_bytes(self) -> bytes:
        """Return the record of the frame and its streams, one after the other."""
        return b"".join((encode_frame_record(self.frame), *self.streams))

    @staticmethod
    def from_bytes(data: bytes | memoryview, path: object = None) -> "EncodedFrame":
        view = memoryview(data)
        frame = decode_frame_record(view[: RECORD.size], path)
        return with_streams(frame, view[RECORD.size :], path)


def with_streams(frame: Frame, data: bytes | memoryview, path: object = None) -> EncodedFrame:
    view, streams = memoryview(data), list[bytes]()
    if len(view) == frame.stored:
        for size in frame.streams:
            streams.append(bytes(view[:size]))
            view = view[size:]
    if len(view) or frame_checksum(frame, streams) != frame.checksum:
        message = f"the frame of the tile at byte {frame.offset} does not match its checksum"
        raise CorruptDataError(message, path=path)
    return EncodedFrame(frame, (streams[0], streams[1], streams[2], streams[3]))


def encode(old: Bytes, new: Bytes, *, width: int = 2, offset: int = 0, target: int = 0) -> EncodedFrame:
    """Return the frame that turns one tile into another.

    Args:
        old: The bytes of the tile before, at most 8 MiB, whole words.
        width: Bytes of a word: 1, 2, 4 or 8; 2 for bfloat16 and float16.
        offset: Where the tile begins in its file.
    """
    before, after = _bytes(old), _bytes(new)
    length = before.size
    if length != after.size or not 0 < length <= TILE or width not in (1, 2, 4, 8) or length % width:
        raise UsageError(
            f"no tile of words of {width} bytes: {length} and {after.size} bytes",
            hint=f"two of one length, at most {TILE} bytes, whole words",
        )
    changed, method, streams, gaps = _encoded(before, after, width)
    sizes = len(streams[0]), len(streams[1]), len(streams[2]), len(streams[3])
    digests = _digest(before), _digest(after)
    frame = Frame(target, width, method, offset, length, changed, gaps, sizes, 0, *digests)
    return EncodedFrame(frame._replace(checksum=frame_checksum(frame, streams)), streams)


def apply(target: Bytes, encoded: EncodedFrame) -> bool:
    """Turn a tile into what a frame makes of it, in place; return False if it was that already.

    Nothing is written unless the tile is what the frame begins with, and the result has the digest that the frame
    says. Apply it again if it was interrupted: the tile is then neither, and raises, or is the result. The bytes of
    the tile must be writable and contiguous.
    """
    frame, words = encoded.frame, _bytes(target)
    if words.size != frame.length:
        raise CorruptDataError(f"a tile of {words.size} bytes where the frame has {frame.length}")
    if not words.flags.writeable:
        raise UsageError("the target is read-only", hint="target = bytearray(target)")
    digest = _digest(words)
    if digest == frame.after:
        return False
    if digest != frame.before:
        raise OtherTileError(
            f"the tile at byte {frame.offset} is neither what the frame changes nor its result"
        )
    if frame.method == XOR:
        _apply_xor(words, encoded)
    else:
        _apply_ulp(words.view(np.uint16), encoded)
    return True


def fold(base: Bytes, frames: Iterable[EncodedFrame]) -> EncodedFrame:
    """Return one frame for one or more that follow each other on a tile. It has nothing of what changed back.

    `base` is the tile before the first: the sizes of changes are stored in an order that follows from its bytes.
    """
    result, places = _bytes(base).copy(), set[tuple[int, Tile]]()
    for encoded in frames:
        places.add((encoded.frame.target, encoded.frame.tile))
        if len(places) > 1:
            raise CorruptDataError("frames of two tiles cannot become one")
        apply(result, encoded)
    if not places:
        raise UsageError("there is no frame to fold", hint="fold(base, [encode(base, result)])")
    ((target, tile),) = places
    return encode(base, result, width=tile.width, offset=tile.offset, target=target)


def _bytes(data: Bytes) -> "NDArray[np.uint8]":
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise UsageError("the array is not contiguous", hint="numpy.ascontiguousarray(array)")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _digest(words: "NDArray[Any]") -> bytes:
    return xxhash.xxh3_128_digest(words.data)


def _encoded(old: "NDArray[np.uint8]", new: "NDArray[np.uint8]", width: int) -> tuple[int, int, Streams, int]:
    """Return how many words changed, the method, the streams, and the bytes of the first one uncompressed."""
    if width != 2:  # noqa: PLR2004 - bytes of a word
        kind = f"u{width}"
        changed = int(np.count_nonzero(old.view(kind) != new.view(kind)))
        return _xor(old, new, changed) if changed else (0, SAME, _EMPTY, 0)
    positions, before, after = changes(old.view(np.uint16), new.view(np.uint16))
    changed, words = positions.size, old.size // 2
    if not changed:
        return 0, SAME, _EMPTY, 0
    if changed > _DENSE * words:
        return _xor(old, new, changed)
    is_sorted = changed <= _SORTED_UP_TO * words
    distances = (after - before).view(np.int16)
    if is_sorted:
        distances = distances.take(by_exponent(before))
    gaps = gap_bytes(positions)
    streams = (packed(gaps), *distance_streams(distances))
    return changed, ULP_SORTED if is_sorted else ULP, streams, gaps.size


def _xor(old: "NDArray[np.uint8]", new: "NDArray[np.uint8]", changed: int) -> tuple[int, int, Streams, int]:
    return changed, XOR, (packed(old ^ new), b"", b"", b""), old.size


def _apply_xor(target: "NDArray[np.uint8]", encoded: EncodedFrame) -> None:
    result = target ^ unpacked(encoded.streams[0], encoded.frame.length)
    _require_result(_digest(result), encoded.frame)
    target[:] = result


def _apply_ulp(words: Words, encoded: EncodedFrame) -> None:
    positions, values = _decoded(words, encoded)
    _require_result(_digest_with(words, positions, values), encoded.frame)
    words[positions] = values


def _require_result(digest: bytes, frame: Frame) -> None:
    if digest != frame.after:
        raise CorruptDataError(
            f"the frame of the tile at byte {frame.offset} makes something else than it says"
        )


def _decoded(words: Words, encoded: EncodedFrame) -> tuple[Positions, Words]:
    frame = encoded.frame
    gaps, *rest = encoded.streams
    positions = positions_of(unpacked(gaps, frame.gaps), frame)
    distances = distances_of((rest[0], rest[1], rest[2]), frame.changed)
    values = words.take(positions)
    if frame.method == ULP_SORTED:
        in_order = np.empty_like(distances)
        in_order[by_exponent(values)] = distances
        distances = in_order
    return positions, values + distances


def _digest_with(words: Words, positions: Positions, values: Words) -> bytes:
    """Return the digest that words would have with some of them changed; block by block, in the cache."""
    state, block = xxhash.xxh3_128(), np.empty(min(BLOCK, words.size), np.uint16)
    cuts = np.searchsorted(positions, np.arange(0, words.size + BLOCK, BLOCK))
    for number, begin in enumerate(range(0, words.size, BLOCK)):
        part = block[: min(BLOCK, words.size - begin)]
        np.copyto(part, words[begin : begin + part.size])
        chosen = slice(cuts[number], cuts[number + 1])
        part[positions[chosen] - begin] = values[chosen]
        state.update(part.data)
    return state.digest()
