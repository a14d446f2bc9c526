"""One shard on its way to the disk: checked, hashed while it is hot, and written behind that."""

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from syncd.errors import UsageError
from syncd.protocol.digest import DEFAULT, hasher
from syncd.transports.filesystem.device_copy import copy
from syncd.transports.filesystem.direct_io import PIECE, THREADS, NewFile, Pipe, Way
from syncd.transports.filesystem.export_walk import DTYPES, Piece, Walk
from syncd.transports.filesystem.finite import check_finite
from syncd.transports.filesystem.layout import Layout, Spec, aligned
from syncd.transports.filesystem.pinned_buffer import Arena, view
from syncd.transports.memory.save import Copy

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class Shard:
    """Takes the data of one file in order, in pieces that begin at multiples of `ALIGN`.

    Args:
        path: Where the file is made.
        layout: Its layout.
        way: How it is written.
        pool: Threads that write.
        check: Whether what is not finite is refused.
        copy: Takes the same bytes, where there is one; its file is begun.
    """

    def __init__(
        self,
        path: str,
        layout: Layout,
        way: Way,
        pool: ThreadPoolExecutor,
        *,
        check: bool,
        copy: Copy | None = None,
    ) -> None:
        self._layout, self._check, self._copy = layout, check, copy
        self._state, self._header = hasher(DEFAULT), Arena(layout.data_offset)
        self._file = NewFile(path, layout.size, way)
        self._pipe = Pipe(self._file, pool)
        self._spans = layout.spans()
        self._span = next(self._spans, None)

    def __enter__(self) -> Self:
        self._header.bytes.copy_(torch.frombuffer(bytearray(self._layout.header), dtype=torch.uint8))
        self._state.update(view(self._header.bytes))
        self._write(view(self._header.bytes), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.abandon()
        self._file.close()
        if self._copy is not None:
            self._copy.close()

    def put(self, memory: torch.Tensor, start: int, length: int) -> None:
        """Write `length` bytes of data that begin at `start`; the memory goes on to a multiple of `ALIGN`."""
        content = memory[:length]
        self._refuse(content, start)
        self._state.update(view(content))
        self._write(view(memory[: aligned(length)]), self._layout.data_offset + start)

    def finish(self) -> tuple[int, str]:
        """Make the file durable and return its size and digest."""
        if self._copy is not None:
            self._copy.finish()
        self._pipe.drain()
        self._file.finish()
        return self._layout.size, f"{DEFAULT}:{self._state.hexdigest()}"

    def _write(self, piece: memoryview, offset: int) -> None:
        self._pipe.put(piece, offset)
        if self._copy is not None:
            self._copy.put(piece, offset)

    def _refuse(self, content: torch.Tensor, start: int) -> None:
        if not self._check:
            return
        end = start + content.numel()
        while self._span is not None and self._span.start < end:
            spec, first, last = self._span
            part = content[max(first, start) - start : min(last, end) - start]
            check_finite(spec.name, part, _TORCH[spec.dtype])
            if last > end:
                break
            self._span = next(self._spans, None)


def put_all(shard: Shard, memory: torch.Tensor, size: int) -> None:
    """Write the data of a shard that is in memory as a whole."""
    for start in range(0, size, PIECE):
        shard.put(memory[start:], start, min(PIECE, size - start))


class ChangedError(UsageError):
    """The export is not what it was when the layout was made."""


class Ring:
    """The little memory through which a shard streams: pieces that are filled, written, and filled again."""

    def __init__(self) -> None:
        # As many as the pipe has under way, and the one being filled.
        self._slots = [Arena(PIECE) for _ in range(THREADS + 1)]
        self._filled = self._start = 0

    def begin(self) -> None:
        """Start a shard."""
        self._filled = self._start = 0

    def add(self, shard: Shard, piece: Piece) -> None:
        """Cast one tensor into the ring, handing full pieces to the shard."""
        flat, position = piece.tensor.reshape(-1), 0
        while position < flat.numel():
            room = (PIECE - self._filled) // piece.dtype.itemsize
            part = flat[position : position + room]
            size = part.numel() * piece.dtype.itemsize
            copy(self._memory[self._filled : self._filled + size].view(piece.dtype), part)
            self._filled, position = self._filled + size, position + part.numel()
            if self._filled == PIECE:
                self.flush(shard)

    def flush(self, shard: Shard) -> None:
        """Hand over what is filled."""
        if self._filled:
            shard.put(self._memory, self._start, self._filled)
            self._start, self._filled = self._start + self._filled, 0
            self._slots.append(self._slots.pop(0))

    @property
    def _memory(self) -> torch.Tensor:
        return self._slots[0].bytes


def pour(walk: Walk, layout: Layout, ring: Ring, shard: Shard) -> None:
    """Stream a walk into a shard, each tensor where the layout has it.

    Raises:
        ChangedError: The walk meets other tensors than the layout has.
    """
    ring.begin()
    expected = iter(layout.specs)
    for piece in walk.in_file_order():
        _require_same(next(expected, None), piece.spec)
        ring.add(shard, piece)
    _require_same(next(expected, None), None)
    ring.flush(shard)


def _require_same(expected: Spec | None, found: Spec | None) -> None:
    if expected != found:
        raise ChangedError(
            f"the export has changed since the first save: {found} where {expected} was",
            hint="save again: the layout is made anew",
        )
