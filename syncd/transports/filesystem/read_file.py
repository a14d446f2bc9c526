"""One file of a version while it is read: through the page cache, or past it where little of it is there.

A page that is read once is not worth a place in the cache, and the device is asked for more at once without it.
"""

import os
import stat
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header, parse_header
from syncd.transports.filesystem.page_cache import cached_share
from syncd.transports.filesystem.read_plan import Piece
from syncd.transports.filesystem.read_targets import ALIGN, bounce, view

RESIDENT = 0.5
"""The share of a file that must be in the page cache for it to be read through it."""

_FIRST_READ = 1 << 16
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never waiting for the writer of a pipe


class Source(NamedTuple):
    """One file to read.

    Args:
        path: Where it is.
        record: Its size and digest; None where nobody wrote them down.
    """

    path: str
    record: FileRecord | None


class OpenFile:
    """One open file: what it holds, and how it is read.

    Args:
        source: The file.
        direct: Whether it may be read past the page cache.

    Raises:
        CorruptDataError: It is not what its record says.
        OSError: It cannot be opened.
    """

    def __init__(self, source: Source, *, direct: bool) -> None:
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
        """Close what is open; a second call does nothing."""
        opened, self._opened = self._opened, []
        for descriptor in opened:
            os.close(descriptor)

    @property
    def is_direct(self) -> bool:
        """Say whether it is read past the page cache."""
        return self._direct is not None

    def _open_direct(self) -> int | None:
        """Open it past the page cache, None where that is refused or it is another file by now."""
        try:
            direct = os.open(self.source.path, _FLAGS | os.O_DIRECT)
        except OSError:
            return None
        self._opened.append(direct)
        same = os.path.sameopenfile(direct, self._descriptor)
        return direct if same and _takes_direct(direct) else None

    def _checked_size(self) -> int:
        found, record = os.fstat(self._descriptor), self.source.record
        if not stat.S_ISREG(found.st_mode):
            raise CorruptDataError("not a regular file", path=self.source.path)
        if record is not None and found.st_size != record.size:
            problem = f"{found.st_size} bytes where {record.size} were written"
            raise CorruptDataError(problem, path=self.source.path)
        return found.st_size

    def _read_header(self) -> Header:
        prefix = os.pread(self._descriptor, _FIRST_READ, 0)
        length = 8 + int.from_bytes(prefix[:8], "little")
        if len(prefix) == _FIRST_READ < length <= self.size:
            prefix += os.pread(self._descriptor, length - _FIRST_READ, _FIRST_READ)
        return parse_header(prefix, self.size, self.source.path)

    def read_into(self, offset: int, views: list[memoryview]) -> None:
        """Fill views one after the other from an offset on, through the page cache."""
        while views:
            done = os.preadv(self._descriptor, views, offset)
            if not done:
                raise CorruptDataError("cut short while it was read", path=self.source.path)
            offset += done
            views = _behind(views, done)

    def read_direct(self, piece: Piece, memory: memoryview) -> int:
        """Read a piece past the page cache into aligned memory; return where in it the piece begins."""
        assert self._direct is not None
        before = piece.offset % ALIGN
        start, needed = piece.offset - before, before + piece.length
        done = 0
        while done < needed:
            length = -(-(needed - done) // ALIGN) * ALIGN
            found = os.preadv(self._direct, [memory[done : done + length]], start + done)
            if done + found < needed and (not found or found % ALIGN):
                raise CorruptDataError("cut short while it was read", path=self.source.path)
            done += found
        return before


def _takes_direct(descriptor: int) -> bool:
    try:
        os.preadv(descriptor, [view(bounce(ALIGN, pinned=False))], 0)
    except OSError:
        return False
    return True


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of views of which so many bytes are filled."""
    for number, one in enumerate(views):
        if done < len(one):
            return [one[done:], *views[number + 1 :]]
        done -= len(one)
    return []
