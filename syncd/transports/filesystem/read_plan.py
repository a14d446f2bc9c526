"""Which bytes of a shard go where: decided before the first one is read, from its header alone.

A plan is a list of pieces that follow each other in the file, each read by one call. A piece consists of parts: bytes
that belong to one tensor, or to none (the header, and what is only there to be hashed).
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.safetensors import DTYPE_BITS, Header, Tensor
from syncd.transports.tensors import TensorMeta

PIECE = 1 << 20
"""The most bytes of one piece: what one thread reads at once."""

PARTS = 256
"""The most parts of one piece; the kernel takes 1024 at once."""


class Part(NamedTuple):
    """Bytes of one piece that go to one place.

    Args:
        length: In bytes, never 0.
        name: The tensor that they belong to, None for bytes that go nowhere.
        start: Where they begin in that tensor, in bytes.
    """

    length: int
    name: str | None = None
    start: int = 0


class Piece(NamedTuple):
    """A stretch of a file: where it begins, how long it is, and what it consists of, in order."""

    offset: int
    length: int
    parts: tuple[Part, ...]


def pieces_of(
    header: Header, wanted: Mapping[str, object], *, whole: bool, limit: int = PIECE
) -> Iterator[Piece]:
    """Yield the pieces of a shard in the order of the file.

    Args:
        header: The shard's header.
        wanted: The names of the tensors whose bytes go somewhere.
        whole: Whether every byte is read, because the file is hashed; else only what goes somewhere.
        limit: The most bytes of a piece.
    """
    offset, length, parts = 0, 0, list[Part]()
    for at, part in _parts(header, wanted, limit):
        skipped = part.name is None and not whole
        if parts and (skipped or length + part.length > limit or len(parts) == PARTS):
            yield Piece(offset, length, tuple(parts))
            length, parts = 0, []
        if not skipped:
            offset = offset if parts else at
            length += part.length
            parts.append(part)
    if parts:
        yield Piece(offset, length, tuple(parts))


def _parts(header: Header, wanted: Mapping[str, object], limit: int) -> Iterator[tuple[int, Part]]:
    """Yield all bytes of a file as parts that fit a piece, each with its offset; no element is cut in two."""
    for start in range(0, header.data_offset, limit):
        yield start, Part(min(limit, header.data_offset - start))
    for tensor in header.tensors.values():
        size = tensor.end - tensor.start
        name = tensor.name if tensor.name in wanted else None
        step = limit - limit % _element(tensor)
        for start in range(0, size, step):
            at = header.data_offset + tensor.start + start
            yield at, Part(min(step, size - start), name, start if name else 0)


def _element(tensor: Tensor) -> int:
    return max(1, DTYPE_BITS[tensor.dtype] // 8)


class Block(NamedTuple):
    """Elements that lie side by side in row-major order: `tensor[within][start:stop]`."""

    within: tuple[int, ...]
    start: int
    stop: int


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks that make up a range of elements of a tensor, as few as there can be of them.

    Args:
        shape: The tensor's shape; not 0-dim.
        start: The first element, counted in row-major order.
        stop: The one behind the last.
    """
    inner = math.prod(shape[1:])
    row_ends = -(-start // inner) * inner
    if start >= stop:
        return
    if start < row_ends:
        cut = min(stop, row_ends)
        yield from _within_row(shape, start, cut)
    elif (cut := stop // inner * inner) > start:
        yield Block((), start // inner, cut // inner)
    else:
        cut = stop
        yield from _within_row(shape, start, cut)
    yield from blocks(shape, cut, stop)


def _within_row(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    row, first = divmod(start, math.prod(shape[1:]))
    for block in blocks(shape[1:], first, first + stop - start):
        yield Block((row, *block.within), block.start, block.stop)


def same(header: Header, offered: Mapping[str, TensorMeta]) -> None:
    """Check that a shard still holds tensors that were offered.

    Raises:
        CorruptDataError: It holds others.
    """
    for tensor in header.tensors.values():
        if offered.get(tensor.name) != (tensor.dtype, tensor.shape):
            raise CorruptDataError(f"tensor {tensor.name} is not what it was when the version was looked at")
