"""New files written as fast as their mount allows; the fastest write mode is found by trying.

Writing past the page cache (O_DIRECT) is as fast as the device, leaves the cache to others and needs
aligned memory. Where it is refused, RWF_DONTCACHE drops the pages behind the write; where that is unknown
too, the write is an ordinary one in small pieces. A file is always new: no open file of others is written into.
"""

import contextlib
import ctypes
import errno
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from syncd.protocol.disk import temporary_name
from syncd.protocol.safetensors import ALIGN, aligned
from syncd.transports.filesystem.pinned_buffer import PinnedBuffer, view

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


class NewFile:
    """A file being written at offsets, by several threads.

    Each write is padded up to a multiple of `ALIGN`; `finish` cuts the padding off.
    """

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
        """Give the file its length and make it durable."""
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class WritePipeline:
    """Hands pieces of one file to threads, a bounded number at once.

    An error of an earlier piece is raised by a later call.
    """

    def __init__(self, file: NewFile, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._pending: deque[Future[None]] = deque()

    def put(self, piece: memoryview, offset: int) -> None:
        """Queue a piece; return once at most `THREADS` pieces are being written."""
        self._pending.append(self._pool.submit(self._file.write, piece, offset))
        while len(self._pending) > THREADS:
            self._pending.popleft().result()

    def drain(self) -> None:
        """Wait until all pieces are written."""
        while self._pending:
            self._pending.popleft().result()

    def abandon(self) -> None:
        """Wait until no thread uses the file or the memory any more; ignore errors of the pieces."""
        while self._pending:
            self._pending.popleft().exception()


def find_write_mode(
    directory: str, modes: Iterable[WriteMode] = WRITE_MODES, name: str = "probe"
) -> WriteMode:
    """Return the first mode in which a small file in this directory can be written.

    The file is a temporary one of `name`: if this process dies first, it is removed when those of `name` are.
    """
    probe = PinnedBuffer(ALIGN)
    for mode in modes:
        with contextlib.suppress(OSError):
            _try(f"{directory}/{temporary_name(name)}", mode, probe.bytes)
            return mode
    return BUFFERED


def _try(path: str, mode: WriteMode, content: torch.Tensor) -> None:
    file = NewFile(path, content.nbytes, mode)
    try:
        file.write(view(content), 0)
    finally:
        file.close()
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
