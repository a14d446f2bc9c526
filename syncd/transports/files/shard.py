"""One shard on its way to the disk: each piece is checked, hashed while it is in the CPU's cache, and written.

Writing past the page cache (O_DIRECT) is as fast as the device, leaves the cache to others and needs aligned memory.
If it is refused, RWF_DONTCACHE drops the pages behind the write; if that is unknown too, the write is an ordinary one
in small pieces. `find_write_mode` tries them. A file is always new: no file that others have open is written into.
"""

import contextlib
import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from syncd.errors import UsageError
from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.disk import temporary_name
from syncd.protocol.safetensors import ALIGN, aligned, parse_header
from syncd.protocol.tile_digests import TileHasher
from syncd.transports.files.buffers import PinnedBuffer
from syncd.transports.files.export_walk import ExportedTensor, ExportWalk, ShardLayout, TensorSpec
from syncd.transports.torch_tensors import TO_TORCH, check_finite, copy_tensor, view

if TYPE_CHECKING:
    from syncd.transports.files.memory_copy import MemoryCopy

PIECE = 16 << 20
"""Bytes handed to a thread at once: enough that neither the device nor Python's lock is asked often."""

THREADS = 2

_RWF_DONTCACHE = 0x80
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class WriteMode:
    """One mode of writing: the flags of the open and of each write, and the most bytes of one write."""

    name: str
    open_flags: int = 0
    write_flags: int = 0
    limit: int = PIECE


DIRECT = WriteMode("direct", open_flags=os.O_DIRECT)
UNCACHED = WriteMode("uncached", write_flags=_RWF_DONTCACHE)
BUFFERED = WriteMode("buffered", limit=1 << 20)
WRITE_MODES = (DIRECT, UNCACHED, BUFFERED)
"""In the order of preference."""

IN_MEMORY = WriteMode("memory", limit=PIECE)


class NewFile:
    """A file that several threads write at offsets, padded to multiples of `ALIGN`; `finish` cuts the padding off."""

    def __init__(self, path: str, size: int, mode: WriteMode) -> None:
        self._mode, self._size = mode, size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | mode.open_flags
        self._descriptor = os.open(path, flags, 0o644)
        try:
            _allocate(self._descriptor, aligned(size))
        except BaseException:
            self.close()
            raise

    def write(self, piece: memoryview, offset: int) -> None:
        """Write a piece; its address, length and offset are multiples of `ALIGN`."""
        while piece:
            part = piece[: self._mode.limit]
            done = os.pwritev(self._descriptor, [part], offset, self._mode.write_flags)
            piece, offset = piece[done:], offset + done

    def finish(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def find_write_mode(
    directory: str, modes: Iterable[WriteMode] = WRITE_MODES, name: str = "probe"
) -> WriteMode | None:
    """Return the first mode in which a small file in this directory can be written, None if there is none now.

    The file is a temporary one of `name`: if this process dies first, it is removed when those of `name` are.
    """
    probe = PinnedBuffer(ALIGN)
    for mode in modes:
        with contextlib.suppress(OSError):
            _try(f"{directory}/{temporary_name(name)}", mode, probe.bytes)
            return mode
    return None


def _try(path: str, mode: WriteMode, content: torch.Tensor) -> None:
    try:
        with contextlib.closing(NewFile(path, content.nbytes, mode)) as file:
            file.write(view(content), 0)
    finally:
        os.unlink(path)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file if the file system can: a full one fails before anything is written.

    posix_fallocate would write into every block where the file system cannot, as on NFS before 4.2.
    """
    if _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise OSError(number, os.strerror(number))


class ShardDigest:
    """Checks and hashes one shard, whose data comes in pieces: for NaN, its digest, its root."""

    def __init__(self, layout: ShardLayout, *, check: bool, has_root: bool = False) -> None:
        self._check, self._tensors = check, layout.tensors()
        self._tensor = next(self._tensors, None)
        self._state, self._tiles = hasher(DEFAULT), None
        self._state.update(layout.header)
        if has_root:
            self._tiles = TileHasher(parse_header(layout.header, layout.size))
            self._tiles.feed(layout.header)

    def add(self, content: torch.Tensor, start: int) -> None:
        """Take the next bytes of data, which begin at `start`."""
        self._check_finite(content, start)
        self._state.update(view(content))
        if self._tiles is not None:
            self._tiles.feed(view(content))

    @property
    def text(self) -> str:
        return f"{DEFAULT}:{self._state.hexdigest()}"

    @property
    def root(self) -> str:
        """Return the root of the file in hexadecimal, empty if none is computed."""
        return self._tiles.hexdigest() if self._tiles is not None else ""

    @property
    def tile_records(self) -> bytes:
        """Return the records of its tiles, of which the root is a digest."""
        return self._tiles.records if self._tiles is not None else b""

    def _check_finite(self, content: torch.Tensor, start: int) -> None:
        end = start + content.numel()
        while self._check and (tensor := self._tensor) is not None and tensor.start < end:
            part = content[max(tensor.start, start) - start : min(tensor.end, end) - start]
            check_finite(tensor.name, part, TO_TORCH[tensor.dtype])
            if tensor.end > end:
                break
            self._tensor = next(self._tensors, None)


class ShardWriter:
    """Writes the data of one new file in order, in pieces that begin at multiples of `ALIGN`.

    `copy`, whose file the caller begins and closes, gets the same bytes. `note` hears how many bytes, from the first
    on, are there.
    """

    def __init__(
        self,
        path: str,
        layout: ShardLayout,
        mode: WriteMode,
        pool: ThreadPoolExecutor,
        digest: ShardDigest,
        copy: "MemoryCopy | None" = None,
        note: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._layout, self._digest, self._copy, self._note = layout, digest, copy, note
        self._header = PinnedBuffer(layout.data_offset)
        self._file = NewFile(path, layout.size, mode)
        self._pool, self._pending = pool, deque[tuple[int, Future[None]]]()

    def __enter__(self) -> Self:
        self._header.bytes.copy_(torch.frombuffer(bytearray(self._layout.header), dtype=torch.uint8))
        self._write(view(self._header.bytes), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, piece in self._pending:  # no thread may use the file or the memory any more
            piece.exception()
        self._file.close()

    def put(self, memory: torch.Tensor, start: int, length: int) -> None:
        """Write `length` bytes of data that begin at `start`; the memory is that long up to a multiple of `ALIGN`."""
        self._digest.add(memory[:length], start)
        self._write(view(memory[: aligned(length)]), self._layout.data_offset + start)

    def finish(self) -> tuple[int, str]:
        if self._copy is not None:
            self._copy.finish()
        self._await_pieces(0)
        self._file.finish()
        return self._layout.size, self._digest.text

    def _write(self, piece: memoryview, offset: int) -> None:
        end = offset + len(piece)
        self._pending.append((end, self._pool.submit(self._file.write, piece, offset)))
        self._await_pieces(THREADS)
        if self._copy is not None:
            self._copy.put(piece, offset)

    def _await_pieces(self, most: int) -> None:
        """Wait until at most so many pieces are being written; raise the error of an earlier one."""
        while len(self._pending) > most:
            end, piece = self._pending.popleft()
            piece.result()
            self._note(end)


def put_all(memory: torch.Tensor, size: int, shard: ShardWriter) -> None:
    for start in range(0, size, PIECE):
        shard.put(memory[start:], start, min(PIECE, size - start))


class Ring:
    """The little memory through which a shard streams: pieces that are filled, written, and filled again."""

    def __init__(self) -> None:
        # As many as the pipeline writes at once, and the one being filled.
        self._slots = [PinnedBuffer(PIECE) for _ in range(THREADS + 1)]
        self._filled = self._start = 0

    def begin(self) -> None:
        self._filled = self._start = 0

    def add(self, shard: ShardWriter, exported: ExportedTensor) -> None:
        """Cast one tensor into the ring, giving full pieces to the shard."""
        flat, position, dtype = exported.tensor.reshape(-1), 0, exported.dtype
        while position < flat.numel():
            room = (PIECE - self._filled) // dtype.itemsize
            part = flat[position : position + room]
            size = part.numel() * dtype.itemsize
            copy_tensor(self._memory[self._filled : self._filled + size].view(dtype), part)
            self._filled, position = self._filled + size, position + part.numel()
            if self._filled == PIECE:
                self.flush(shard)

    def flush(self, shard: ShardWriter) -> None:
        if self._filled:
            shard.put(self._memory, self._start, self._filled)
            self._start, self._filled = self._start + self._filled, 0
            self._slots.append(self._slots.pop(0))

    @property
    def _memory(self) -> torch.Tensor:
        return self._slots[0].bytes


def pour(walk: ExportWalk, layout: ShardLayout, ring: Ring, shard: ShardWriter) -> None:
    ring.begin()
    expected = iter(layout.specs)
    for exported in walk.in_file_order():
        _require_same(next(expected, None), exported.spec)
        ring.add(shard, exported)
    _require_same(next(expected, None), None)
    ring.flush(shard)


def _require_same(expected: TensorSpec | None, spec: TensorSpec | None) -> None:
    if expected != spec:
        raise UsageError(
            f"the export has changed since the first save: {spec} where {expected} was",
            hint="save again: the next save makes a new layout",
        )
