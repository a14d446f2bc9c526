"""One file of a version while it is read: which pieces of it are read, and how.

A file is read in pieces that follow each other, each by one call. A piece consists of parts: bytes of one tensor, or
of none (the header, and what is read only to be hashed). The header alone decides them, before any data is read.

A file of which little is in the page cache is read past it: a page that is read once is not worth a place there, and
the device gets larger requests.
"""

import ctypes
import os
import stat
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import ALIGN, DTYPE_BITS, Header, Tensor, parse_header
from syncd.transports.tensors import TensorMeta
from syncd.transports.torch_tensors import aligned_memory, view

PIECE = 1 << 20  # the most bytes of one piece: what one thread reads at once
PARTS = 256  # the most parts of one piece; the kernel accepts 1024 in one call
RESIDENT = 0.5  # the share of a file that must be in the page cache for it to be read through it

_FIRST_READ = 1 << 16
_FLAGS = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
)  # opening a pipe must not wait for its writer
_CACHESTAT = 451
_SAMPLES = 16
_LIBC = ctypes.CDLL(None, use_errno=True)


class ReadSource(NamedTuple):
    path: str
    record: FileRecord | None  # its size and digest; None if no manifest lists it


class ReadPart(NamedTuple):
    """Bytes of one piece that belong to one tensor, or to none."""

    length: int  # in bytes, never 0
    name: str | None = None  # the tensor; None for bytes that are only hashed
    start: int = 0  # offset of the first byte in that tensor, in bytes


class ReadPiece(NamedTuple):
    offset: int
    length: int
    parts: tuple[ReadPart, ...]


class OpenFile:
    def __init__(self, source: ReadSource, *, direct: bool) -> None:
        self.source = source
        self._descriptor = os.open(source.path, _FLAGS)
        self._opened = [self._descriptor]
        self._direct: int | None = None
        try:
            self.size = self._checked_size()
            self.header = self._read_header()
            if direct and cached_share(self._descriptor, self.size) < RESIDENT:
                self._direct = self._open_direct()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        opened, self._opened = self._opened, []
        for descriptor in opened:
            os.close(descriptor)

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def require_tensors(self, offered: Mapping[str, TensorMeta]) -> None:
        for tensor in self.header.tensors.values():
            if offered.get(tensor.name) != (tensor.dtype, tensor.shape):
                raise CorruptDataError(f"tensor {tensor.name} has changed since the version was checked")

    def read_into(self, offset: int, views: list[memoryview]) -> None:
        """Fill views one after the other from an offset on, through the page cache."""
        while views:
            done = os.preadv(self._descriptor, views, offset)
            if not done:
                raise CorruptDataError("cut short while it was read", path=self.source.path)
            offset += done
            views = _unfilled(views, done)

    def read_direct(self, piece: ReadPiece, memory: memoryview) -> int:
        """Read a piece past the page cache into aligned memory; return where in it the piece begins."""
        assert self._direct is not None
        before = piece.offset % ALIGN
        start, needed = piece.offset - before, before + piece.length
        done = 0
        while done < needed:
            length = -(-(needed - done) // ALIGN) * ALIGN
            count = os.preadv(self._direct, [memory[done : done + length]], start + done)
            if done + count < needed and (not count or count % ALIGN):
                raise CorruptDataError("cut short while it was read", path=self.source.path)
            done += count
        return before

    def _open_direct(self) -> int | None:
        """Open it past the page cache; None if that is refused or the path is another file by now."""
        try:
            direct = os.open(self.source.path, _FLAGS | os.O_DIRECT)
        except OSError:
            return None
        self._opened.append(direct)
        same = os.path.sameopenfile(direct, self._descriptor)
        return direct if same and _supports_direct(direct) else None

    def _checked_size(self) -> int:
        status, record = os.fstat(self._descriptor), self.source.record
        if not stat.S_ISREG(status.st_mode):
            raise CorruptDataError("not a regular file", path=self.source.path)
        if record is not None and status.st_size != record.size:
            problem = f"{status.st_size} bytes where {record.size} were written"
            raise CorruptDataError(problem, path=self.source.path)
        return status.st_size

    def _read_header(self) -> Header:
        prefix = os.pread(self._descriptor, _FIRST_READ, 0)
        length = 8 + int.from_bytes(prefix[:8], "little")
        if len(prefix) == _FIRST_READ < length <= self.size:
            prefix += os.pread(self._descriptor, length - _FIRST_READ, _FIRST_READ)
        return parse_header(prefix, self.size, self.source.path)


def pieces_of(
    header: Header, wanted: Container[str], *, whole: bool, limit: int = PIECE
) -> Iterator[ReadPiece]:
    """Yield a file's pieces in order: all of them if it is hashed (`whole`), else only those of wanted tensors."""
    offset, length, parts = 0, 0, list[ReadPart]()
    for at, part in _parts(header, wanted, limit):
        skipped = part.name is None and not whole
        if parts and (skipped or length + part.length > limit or len(parts) == PARTS):
            yield ReadPiece(offset, length, tuple(parts))
            length, parts = 0, []
        if not skipped:
            offset = offset if parts else at
            length += part.length
            parts.append(part)
    if parts:
        yield ReadPiece(offset, length, tuple(parts))


def _parts(header: Header, wanted: Container[str], limit: int) -> Iterator[tuple[int, ReadPart]]:
    """Yield all bytes of a file as parts that fit a piece, each with its offset; no element is cut in two."""
    for start in range(0, header.data_offset, limit):
        yield start, ReadPart(min(limit, header.data_offset - start))
    for tensor in header.tensors.values():
        size = tensor.end - tensor.start
        name = tensor.name if tensor.name in wanted else None
        step = limit - limit % _element_size(tensor)
        for start in range(0, size, step):
            at = header.data_offset + tensor.start + start
            yield at, ReadPart(min(step, size - start), name, start if name else 0)


def _element_size(tensor: Tensor) -> int:
    return max(1, DTYPE_BITS[tensor.dtype] // 8)


def cached_share(descriptor: int, size: int) -> float:
    """Return the share of an open file that is in the page cache; 1 if it is not known.

    Linux 6.5 and later has cachestat; elsewhere a few pages are read without waiting.
    """
    if not size:
        return 1.0
    pages = _cached_pages(descriptor)
    if pages is not None:
        return min(1.0, pages * os.sysconf("SC_PAGE_SIZE") / size)
    return _sampled(descriptor, size)


def _cached_pages(descriptor: int) -> int | None:
    """Return how many pages of a file are cached; None if the kernel or the file system does not say."""
    whole = (ctypes.c_uint64 * 2)(0, 0)
    counts = (ctypes.c_uint64 * 5)()
    done = _LIBC.syscall(
        ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), whole, counts, ctypes.c_uint(0)
    )
    return int(counts[0]) if done == 0 else None


def _sampled(descriptor: int, size: int) -> float:
    offsets = range(0, size, max(1, size // _SAMPLES))
    try:
        return sum(_is_cached(descriptor, offset) for offset in offsets) / len(offsets)
    except OSError:
        return 1.0


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def _supports_direct(descriptor: int) -> bool:
    try:
        os.preadv(descriptor, [view(aligned_memory(ALIGN, pinned=False))], 0)
    except OSError:
        return False
    return True


def _unfilled(views: list[memoryview], done: int) -> list[memoryview]:
    for number, part in enumerate(views):
        if done < len(part):
            return [part[done:], *views[number + 1 :]]
        done -= len(part)
    return []
