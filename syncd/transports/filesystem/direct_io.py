"""The fastest way in which a mount takes a new file, found by trying.

Writing past the page cache (O_DIRECT) is as fast as the device, leaves the cache to others and needs
aligned memory. Where it is refused, RWF_DONTCACHE drops the pages behind the write; where that is unknown
too, the write is an ordinary one in small pieces. A file is always new: nobody's open file is written into.
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
from syncd.transports.filesystem.layout import ALIGN, aligned
from syncd.transports.filesystem.pinned_buffer import Arena, view

PIECE = 16 << 20
"""Bytes handed to a thread at once: enough that neither the device nor Python's lock is asked often."""

THREADS = 2

_RWF_DONTCACHE = 0x80
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of writing: flags of the open and of each write, and the most bytes of one write."""

    name: str
    open_flags: int = 0
    write_flags: int = 0
    limit: int = PIECE


DIRECT = Way("direct", open_flags=os.O_DIRECT)
UNCACHED = Way("uncached", write_flags=_RWF_DONTCACHE)
BUFFERED = Way("buffered", limit=1 << 20)
WAYS = (DIRECT, UNCACHED, BUFFERED)
"""In the order of preference."""


class NewFile:
    """A file being written at offsets, by several threads.

    Each write is padded up to a multiple of `ALIGN`; `finish` cuts the padding off.
    """

    def __init__(self, path: str, size: int, way: Way) -> None:
        self._way, self._size = way, size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | way.open_flags
        self._descriptor = os.open(path, flags, 0o644)
        try:
            _allocate(self._descriptor, aligned(size))
        except BaseException:
            self.close()
            raise

    def write(self, piece: memoryview, offset: int) -> None:
        """Write a piece; its address, length and offset are multiples of `ALIGN`."""
        while piece:
            part = piece[: self._way.limit]
            done = os.pwritev(self._descriptor, [part], offset, self._way.write_flags)
            piece, offset = piece[done:], offset + done

    def finish(self) -> None:
        """Give the file its length and make it durable."""
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Pipe:
    """Hands pieces of one file to threads, a bounded number at a time.

    An error of an earlier piece is raised by a later call.
    """

    def __init__(self, file: NewFile, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._pending: deque[Future[None]] = deque()

    def put(self, piece: memoryview, offset: int) -> None:
        """Have a piece written; returns once at most `THREADS` are under way."""
        self._pending.append(self._pool.submit(self._file.write, piece, offset))
        while len(self._pending) > THREADS:
            self._pending.popleft().result()

    def drain(self) -> None:
        """Wait until all pieces are written."""
        while self._pending:
            self._pending.popleft().result()

    def abandon(self) -> None:
        """Wait until no thread touches the file or the memory any more, whatever became of the pieces."""
        while self._pending:
            self._pending.popleft().exception()


def choose(directory: str, ways: Iterable[Way] = WAYS, name: str = "probe") -> Way:
    """Return the first way that a small file in this directory can be written in.

    The file is a temporary one of `name`: if this process dies right then, it goes when those of `name` do.
    """
    probe = Arena(ALIGN)
    for way in ways:
        with contextlib.suppress(OSError):
            _try(f"{directory}/{temporary_name(name)}", way, probe.bytes)
            return way
    return BUFFERED


def _try(path: str, way: Way, content: torch.Tensor) -> None:
    file = NewFile(path, content.nbytes, way)
    try:
        file.write(view(content), 0)
    finally:
        file.close()
        os.unlink(path)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file, where the file system can; a full one says so before anything is written.

    posix_fallocate would write into every block where the file system cannot, as on NFS before 4.2.
    """
    if _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise OSError(number, os.strerror(number))
