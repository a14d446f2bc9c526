"""The streams of `ulp1`: where words changed and by how much, as bytes, and zstd around them.

What is read may be hostile: each stream is given room for the bytes that its frame says, and no more.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from syncd.errors import CorruptDataError
from syncd.protocol.delta import Frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

Positions: TypeAlias = "NDArray[np.integer[Any]]"
Words: TypeAlias = "NDArray[np.uint16]"

BLOCK = 1 << 18  # words that are compared or copied at once: 512 KiB, which stay in the CPU's cache

_EXPONENT = 7
_MORE = 255
_ZSTD = pa.Codec("zstd", compression_level=1)


def changes(old: Words, new: Words) -> tuple[Positions, Words, Words]:
    """Return where two arrays differ, and the words of both there. Four words are compared at once."""
    whole = old.size - old.size % 4
    first, second = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    same, blocks = np.empty(BLOCK // 4, bool), list[tuple[Positions, Words, Words]]()
    for begin in range(0, first.size, same.size):
        left, right = first[begin : begin + same.size], second[begin : begin + same.size]
        (at,) = np.not_equal(left, right, out=same[: left.size]).nonzero()
        before, after = left.take(at).view(np.uint16), right.take(at).view(np.uint16)
        (differ,) = (before != after).nonzero()
        places = ((at.take(differ >> 2) + begin) << 2) + (differ & 3)
        blocks.append((places, before.take(differ), after.take(differ)))
    (rest,) = (old[whole:] != new[whole:]).nonzero()
    blocks.append((rest + whole, old[whole:].take(rest), new[whole:].take(rest)))
    parts = list(zip(*blocks, strict=True))
    return np.concatenate(parts[0]), np.concatenate(parts[1]), np.concatenate(parts[2])


def gap_bytes(positions: Positions) -> "NDArray[np.uint8]":
    """Return the unchanged words before each changed one, as bytes; 255 stands for 255 of them, and more follow."""
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    long = (gaps >= _MORE).nonzero()[0]
    if not long.size:
        return gaps.astype(np.uint8)
    more = gaps.take(long) // _MORE
    gaps[long] -= _MORE * more
    stream = np.full(gaps.size + int(more.sum()), _MORE, np.uint8)
    shifts = np.zeros(gaps.size, np.int64)
    shifts[long] = more
    stream[np.arange(gaps.size) + np.cumsum(shifts)] = gaps
    return stream


def by_exponent(words: Words) -> "NDArray[np.intp]":
    """Return the stable order of words by the exponent that they have as bfloat16."""
    return np.argsort((words >> _EXPONENT).astype(np.uint8), kind="stable")


def distance_streams(distances: "NDArray[np.int16]") -> tuple[bytes, bytes, bytes]:
    """Return the streams of distances: signs, sizes less one as bytes, and those sizes that no byte holds."""
    negative = distances < 0
    sizes = np.abs(distances).view(np.uint16) - np.uint16(1)
    escapes = sizes[sizes >= _MORE]
    signs = np.packbits(negative).tobytes()
    return (
        signs,
        packed(np.minimum(sizes, _MORE).astype(np.uint8)),
        packed(escapes.astype("<u2").view(np.uint8)),
    )


def distances_of(streams: tuple[bytes, bytes, bytes], count: int) -> Words:
    """Return `count` distances, modulo 2^16, from their streams."""
    signs, packed_sizes, escapes = streams
    sizes = unpacked(packed_sizes, count).astype(np.uint16)
    escaped = (sizes == _MORE).nonzero()[0]
    sizes[escaped] = unpacked(escapes, 2 * escaped.size).view("<u2")
    sizes += np.uint16(1)
    negative = np.unpackbits(np.frombuffer(signs, np.uint8), count=count).astype(np.uint16)
    # Two's complement by hand: a ufunc with a mask takes ten times as long.
    sizes ^= np.negative(negative)
    sizes += negative
    return sizes


def positions_of(gaps: "NDArray[np.uint8]", frame: Frame) -> Positions:
    """Return the positions that gaps lead to, each inside the tile."""
    ends = gaps != _MORE
    # Of the type that numpy indexes with, so that no later step converts them.
    steps: Positions = np.add(gaps, ends, dtype=np.intp)
    positions = np.cumsum(steps, out=steps)
    if not ends.all():
        positions = positions[ends]
    positions -= 1
    if positions.size != frame.changed or not ends[-1] or positions[-1] >= frame.words:
        raise CorruptDataError(
            f"the frame of the tile at byte {frame.offset} changes words that are not there"
        )
    return positions


def packed(data: "NDArray[np.uint8]") -> bytes:
    """Return a stream as it is stored: compressed, unless that is no shorter."""
    compressed: bytes = _ZSTD.compress(data, asbytes=True) if data.size else b""
    return compressed if len(compressed) < data.size else data.tobytes()


def unpacked(stored: bytes, size: int) -> "NDArray[np.uint8]":
    """Return a stream of `size` bytes; zstd is given room for no more."""
    if len(stored) == size:
        return np.frombuffer(stored, np.uint8)
    try:
        return np.frombuffer(_ZSTD.decompress(stored, decompressed_size=size), np.uint8)
    except (OSError, ValueError) as error:
        raise CorruptDataError("a stream of a frame cannot be decompressed") from error
