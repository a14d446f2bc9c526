"""The thin shell of loading: reads pieces with threads, hashes them in order, and copies what did not go straight.

A file that is in the page cache is read right into the parameters. One that is not is read past the cache, through
aligned memory of a few MiB: a page that is read once is not worth a place there, and the device is asked for more.
"""

import ctypes
import os
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from explorer_hooks.base import TensorMeta
from explorer_hooks.loading.places import ALIGN, Held, bounce, is_straight, put, view
from explorer_hooks.loading.plan import PIECE, Part, Piece, pieces_of, same
from explorer_hooks.loading.residency import cached_share
from syncd.errors import CorruptDataError
from syncd.protocol.digest import Hasher, hasher, name_of
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header, parse_header

THREADS = 4
_BESIDE = 2
"""Pieces beside those that threads read: one that is being hashed, and one that waits for it."""

RESIDENT = 0.5
"""The share of a file that must be in the page cache for it to be read through it."""

_FIRST_READ = 1 << 16
_WORD = 8
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never waiting for the writer of a pipe


@dataclass(slots=True)
class Loaded:
    """What a load did: bytes read, and how many files were read directly and how many through the page cache."""

    bytes: int = 0
    direct: int = 0
    cached: int = 0


class Source(NamedTuple):
    """One file to read.

    Args:
        path: The file.
        record: Its size and digest; None where nobody wrote them down.
    """

    path: str
    record: FileRecord | None


@dataclass(frozen=True, slots=True)
class Job:
    """What is read from where to where.

    Args:
        sources: The files.
        held: The tensors to fill.
        offered: What each tensor of the files is, by name.
        unused: Names of the files that are not taken.
        verify: Whether each file is hashed and compared with its digest.
        direct: Whether files that are not in the page cache are read past it. Not where several processes of a host
            read the same file: each would read it from the device.
        threads: How many read.
    """

    sources: Sequence[Source]
    held: Held
    offered: Mapping[str, TensorMeta]
    unused: frozenset[str] = frozenset()
    verify: bool = True
    direct: bool = True
    threads: int = THREADS

    def target(self, name: str) -> torch.Tensor:
        """Return the tensor that a name of the files belongs to."""
        return self.held.tensors[self.held.aliases.get(name, name)]


def read_all(job: Job) -> Loaded:
    """Fill tensors from files.

    Raises:
        CorruptDataError: A file is not what its record says; tensors may be filled in part, or with what is wrong.
        OSError: It cannot be read; the same holds.
    """
    pinned = any(tensor.device.type == "cuda" for tensor in job.held.tensors.values())
    with ThreadPoolExecutor(job.threads, thread_name_prefix="load") as pool:
        reader = _Reader(job, pool, pinned=pinned)
        for source in job.sources:
            with _File(source, direct=job.direct) as file:
                reader.read(file)
        return reader.loaded


class _File:
    """One open file: what it holds, and how it is read."""

    def __init__(self, source: Source, *, direct: bool) -> None:
        self.source = source
        self._descriptor = os.open(source.path, _FLAGS)
        self._direct: int | None = None
        try:
            self.size = self._checked_size()
            self.header = self._read_header()
            if direct and cached_share(self._descriptor, self.size) < RESIDENT:
                self._direct = _open_direct(source.path, self._descriptor)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    @property
    def is_direct(self) -> bool:
        """Say whether it is read past the page cache."""
        return self._direct is not None

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

    def read_direct(self, piece: Piece, memory: torch.Tensor) -> int:
        """Read a piece past the page cache; return where in the memory it begins."""
        assert self._direct is not None
        before = piece.offset % ALIGN
        start, needed = piece.offset - before, before + piece.length
        whole, done = view(memory), 0
        while done < needed:
            length = -(-(needed - done) // ALIGN) * ALIGN
            found = os.preadv(self._direct, [whole[done : done + length]], start + done)
            if done + found < needed and (not found or found % ALIGN):
                raise CorruptDataError("cut short while it was read", path=self.source.path)
            done += found
        return before


def _open_direct(path: str, descriptor: int) -> int | None:
    """Open a file past the page cache, None where that is refused or it is another file by now."""
    try:
        direct = os.open(path, _FLAGS | os.O_DIRECT)
    except OSError:
        return None
    if os.path.sameopenfile(direct, descriptor) and _takes_direct(direct):
        return direct
    os.close(direct)
    return None


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


@dataclass(slots=True)
class _Slot:
    """Memory that pieces pass through, and what is to be hashed of the piece that it is used for."""

    memory: torch.Tensor
    views: list[memoryview] = field(default_factory=list)


class _Reader:
    """Keeps pieces of all files under way, and finishes them in order.

    Args:
        job: What is read.
        pool: The threads.
        pinned: Whether devices are filled.
    """

    def __init__(self, job: Job, pool: ThreadPoolExecutor, *, pinned: bool) -> None:
        self._job, self._pool = job, pool
        self._wanted = {name: None for name in job.offered if name not in job.unused}
        self._free = [_Slot(bounce(PIECE + 2 * ALIGN, pinned=pinned)) for _ in range(job.threads + _BESIDE)]
        self._pending: deque[tuple[Future[None], _Slot]] = deque()
        self.loaded = Loaded()

    def read(self, file: _File) -> None:
        """Read one file as a whole."""
        same(file.header, self._job.offered)
        record = file.source.record if self._job.verify else None
        state = hasher(name_of(record.digest)) if record else None
        try:
            for piece in pieces_of(file.header, self._wanted, whole=state is not None):
                self._begin(file, piece, state)
            while self._pending:
                self._finish(state)
        finally:
            self._abandon()
        _compare(state, file.source)
        self._count(file)

    def _begin(self, file: _File, piece: Piece, state: Hasher | None) -> None:
        while not self._free:
            self._finish(state)
        slot = self._free.pop()
        self._pending.append((self._pool.submit(self._take, file, piece, slot), slot))
        self.loaded.bytes += piece.length

    def _abandon(self) -> None:
        """Wait until no thread touches memory or the file any more, whatever became of the pieces."""
        while self._pending:
            self._pending.popleft()[0].exception()

    def _finish(self, state: Hasher | None) -> None:
        future, slot = self._pending.popleft()
        future.result()
        if state is not None:
            for one in slot.views:
                state.update(one)
        slot.views = []
        self._free.append(slot)

    def _take(self, file: _File, piece: Piece, slot: _Slot) -> None:
        """Read one piece and bring it to where it belongs, in a thread."""
        if file.is_direct:
            self._take_direct(file, piece, slot)
        else:
            self._take_cached(file, piece, slot)

    def _take_direct(self, file: _File, piece: Piece, slot: _Slot) -> None:
        start = file.read_direct(piece, slot.memory)
        slot.views = [view(slot.memory[start : start + piece.length])]
        for part in piece.parts:
            content = slot.memory[start : start + part.length]
            straight = self._straight(file.header, part)
            if straight is not None:
                _move(straight, content)
            elif part.name is not None:
                self._put(file.header, part, content)
            start += part.length

    def _take_cached(self, file: _File, piece: Piece, slot: _Slot) -> None:
        through, used = [], 0
        for part in piece.parts:
            straight = self._straight(file.header, part)
            if straight is None:
                content = slot.memory[used : used + part.length]
                used = -(-(used + part.length) // _WORD) * _WORD
                through.append((part, content))
                straight = content
            slot.views.append(view(straight))
        file.read_into(piece.offset, list(slot.views))
        for part, content in through:
            if part.name is not None:
                self._put(file.header, part, content)

    def _straight(self, header: Header, part: Part) -> torch.Tensor | None:
        """Return the bytes of the tensor that a part is, None if it cannot be read right into it."""
        if part.name is None:
            return None
        tensor = self._job.target(part.name)
        if not is_straight(tensor, header.tensors[part.name].dtype):
            return None
        return tensor.view(-1).view(torch.uint8)[part.start : part.start + part.length]

    def _put(self, header: Header, part: Part, content: torch.Tensor) -> None:
        assert part.name is not None
        put(self._job.target(part.name), header.tensors[part.name].dtype, part, content)

    def _count(self, file: _File) -> None:
        if file.is_direct:
            self.loaded.direct += 1
        else:
            self.loaded.cached += 1


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes; libc does it with Python's lock let go, and without waking torch's threads."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _compare(state: Hasher | None, source: Source) -> None:
    """Check the digest of a file that was hashed."""
    if state is None or source.record is None:
        return
    found = f"{name_of(source.record.digest)}:{state.hexdigest()}"
    if found != source.record.digest:
        raise CorruptDataError("content does not match its digest", path=source.path)
