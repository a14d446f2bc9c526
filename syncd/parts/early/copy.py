"""Copies the shard files of an attempt into the stage while they are written. Imports no torch.

Each byte is hashed as it is copied, from the memory it is written from. What the notes of the writers say decides
only when bytes are read; whether they may be used is for the digests of the sealed step alone.

A host that gets steps together with others copies its share of the tiles, each with a digest of its own, once all
writers have left a note and the headers say where tiles begin.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from syncd.errors import CorruptDataError, StorageError, SyncdError
from syncd.protocol.digest import DEFAULT, digest_bytes, hasher
from syncd.protocol.disk import MISSING
from syncd.protocol.local_disk import write_all_at
from syncd.protocol.safetensors import Header, parse_header
from syncd.protocol.write_progress import WriteProgress, shard_path
from syncd.transports.files.copy_files import give_up_if
from syncd.transports.files.piece_reader import ByteSpan, PartialFile
from syncd.transports.files.stage import EarlyDirectory

PIECE = 8 << 20
THREADS = 2
_READ = 2 << 20
"""Bytes of one read: where 32 MiB were asked for at once, the connection of an NFS client of one core stalled."""

_ALIGN = 4096
PATIENCE = 10.0
_PREFIX = 8  # bytes that have the length of a header
_FIRST_READ = 64 << 10
_WAIT, _JOIN = 0.1, 5.0
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CopiedFile(NamedTuple):
    name: str
    path: str
    size: int
    digest: str


Divide = Callable[[dict[str, Header]], dict[str, Sequence[ByteSpan]]]
"""Returns which spans of files are copied, from the headers of all files of an attempt."""


class _Piece(NamedTuple):
    file: "_EarlyFile"
    offset: int
    length: int
    is_header: bool = False


class _EarlyFile:
    """One shard file, and how much of it was handed out, copied and hashed. The lock of the copy guards it.

    If it `is_divided`, only spans of it are copied, which `divide` names.
    """

    def __init__(self, note: WriteProgress, source: int, target: str, *, is_divided: bool) -> None:
        self.size, self.source, self.path = note.size, source, target
        self.target = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.available = self.copying = self.hashed = 0
        self.state, self.digests = hasher(DEFAULT), dict[ByteSpan, str]()
        self.is_divided = is_divided
        self.header: Header | None = None
        self._header_length = _FIRST_READ if is_divided else 0  # bytes of it that are read next
        self._todo = deque(() if is_divided else _cut(note.size))

    @property
    def digest(self) -> str:
        return f"{DEFAULT}:{self.state.hexdigest()}"

    @property
    def is_whole(self) -> bool:
        return self.hashed == self.size and not self.is_divided

    def divide(self, spans: Iterable[ByteSpan]) -> None:
        self._todo.extend(spans)

    def leave_rest(self) -> None:
        """Hand out nothing more."""
        self._todo.clear()
        self._header_length = 0

    def take(self) -> _Piece | None:
        if self._header_length:
            return self._take_header()
        if not self._todo or self._todo[0].end > self.available:
            return None
        self.copying += 1
        return _Piece(self, *self._todo.popleft())

    def _take_header(self) -> _Piece | None:
        length = min(self._header_length, self.size)
        if length > self.available:
            return None
        self._header_length = 0
        self.copying += 1
        return _Piece(self, 0, length, is_header=True)

    def add_header(self, data: memoryview) -> None:
        """Take what was read of the header; more is asked for unless it is larger than a piece."""
        length = _PREFIX + int.from_bytes(data[:_PREFIX], "little")
        if length <= len(data):
            self.header = parse_header(bytes(data), self.size, self.path)
        elif length <= min(PIECE, self.size):
            self._header_length = length

    def read(self, buffer: mmap.mmap, piece: _Piece) -> memoryview:
        """Return a piece, read past the page cache where that can be: there it is never older than the file."""
        wanted, got = memoryview(buffer)[: -(-piece.length // _ALIGN) * _ALIGN], 0
        while got < piece.length:
            count = self._read_some(wanted[got : got + _READ], piece.offset + got)
            if not count:
                raise CorruptDataError(f"{got} bytes where {piece.length} were written", path=self.path)
            got += count
        return wanted[: piece.length]

    def _read_some(self, memory: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.source, [memory], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        _read_through_cache(self.source)
        return os.preadv(self.source, [memory], offset)

    def close(self) -> None:
        os.close(self.source)
        os.close(self.target)


class EarlyCopy:
    """The copy of one attempt. Its own threads copy; another one tells how far the attempt is.

    `directory` is closed with the copy. `divide` names the spans that are copied, if that is not all of every file.
    """

    def __init__(self, directory: EarlyDirectory, divide: Divide | None = None) -> None:
        self.directory = directory
        self.failure = ""
        self.copied = 0  # bytes
        self._divide, self._is_divided = divide, False
        self._files: dict[str, _EarlyFile] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._users = THREADS + 1  # of open files: the threads, and whoever is to close the copy
        self._threads = [
            threading.Thread(target=self._work, name="early", daemon=True) for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_revoked(self) -> bool:
        return bool(self.failure) or not self.directory.is_valid()

    def follow(self, attempt_path: str, notes: Iterable[WriteProgress]) -> None:
        """Copy what is there of the files that writers have noted."""
        notes = tuple(notes)
        for note in notes:
            if note.name not in self._files and (source := _open_source(attempt_path, note)) is not None:
                self._begin(note, source)
            with self._changed:
                if (file := self._files.get(note.name)) is not None and file.size == note.size:
                    file.available = max(file.available, note.written)
                    self._changed.notify_all()
        if self._divide is not None and not self._is_divided:
            self._divide_files(self._divide, max((note.world_size for note in notes), default=0))

    def _divide_files(self, divide: Divide, writers: int) -> None:
        with self._changed:
            headers = {name: file.header for name, file in self._files.items() if file.header is not None}
        if not len(headers) == writers > 0:
            return
        spans = divide(headers)
        with self._changed:
            if self._is_divided:  # it ended meanwhile
                return
            self._is_divided = True
            for name, file in self._files.items():
                file.divide(spans.get(name, ()))
            self._changed.notify_all()

    def end(self) -> None:
        """Copy the files to their ends: the step is sealed."""
        with self._changed:
            for file in self._files.values():
                file.available = file.size
            self._changed.notify_all()

    def finish(self, stop: Callable[[], bool]) -> dict[str, CopiedFile]:
        """Return the files that are whole, by name, once all that were begun are. `stop` is polled.

        Files that make no progress for `PATIENCE` seconds are left out.
        """
        self.end()
        with self._changed:
            since, before = time.monotonic(), -1
            while not self.is_revoked and not all(file.is_whole for file in self._files.values()):
                give_up_if(stop, self.directory.path)
                hashed = sum(file.hashed for file in self._files.values())
                if hashed != before:
                    since, before = time.monotonic(), hashed
                elif time.monotonic() - since >= PATIENCE:
                    break
                self._changed.wait(_WAIT)
        return {} if self.is_revoked else {file.name: file for file in self.whole()}

    def finish_partial(self, stop: Callable[[], bool]) -> dict[str, PartialFile]:
        """Return what was copied of each file, by name; what was not begun yet is left to the caller.

        Nothing is returned if a piece on its way makes no progress for `PATIENCE` seconds: it could still be written.
        """
        with self._changed:
            self._is_divided = True
            for file in self._files.values():
                file.leave_rest()
            until = time.monotonic() + PATIENCE
            while self._is_copying and not self.is_revoked and time.monotonic() < until:
                give_up_if(stop, self.directory.path)
                self._changed.wait(_WAIT)
            if self.is_revoked or self._is_copying:
                return {}
            return {name: PartialFile(file.path, file.digests) for name, file in self._files.items()}

    @property
    def _is_copying(self) -> bool:
        return any(file.copying for file in self._files.values())

    def whole(self) -> list[CopiedFile]:
        with self._changed:
            return [
                CopiedFile(name, file.path, file.size, file.digest)
                for name, file in self._files.items()
                if file.is_whole
            ]

    def close(self) -> None:
        """End the threads, and remove what is left in the stage.

        A thread that waits for a mount holds the room of the files until the mount answers.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._leave()
        for thread in self._threads:
            thread.join(_JOIN)
        self.directory.close()

    def _leave(self) -> None:
        """Use the files no more; the last one that leaves closes them."""
        with self._changed:
            self._users -= 1
            if not self._users:
                for file in self._files.values():
                    file.close()

    def _begin(self, note: WriteProgress, source: int) -> None:
        with self._changed:
            if self._closed or self.failure:
                os.close(source)
                return
            try:
                path = f"{self.directory.path}/{note.name}"
                is_divided = self._divide is not None
                self._files[note.name] = _EarlyFile(note, source, path, is_divided=is_divided)
            except OSError as error:
                os.close(source)
                self._fail(error)

    def _work(self) -> None:
        try:
            with contextlib.closing(mmap.mmap(-1, PIECE)) as buffer:
                self._copy_all(buffer)
        finally:
            self._leave()

    def _copy_all(self, buffer: mmap.mmap) -> None:
        while (piece := self._next()) is not None:
            try:
                self._copy(buffer, piece)
            except (OSError, SyncdError) as error:
                self._fail(error)

    def _next(self) -> _Piece | None:
        with self._changed:
            while not self._closed and not self.failure:
                for file in self._files.values():
                    if (piece := file.take()) is not None:
                        return piece
                self._changed.wait(_WAIT)
        return None

    def _copy(self, buffer: mmap.mmap, piece: _Piece) -> None:
        if not self.directory.is_valid():
            raise StorageError("its room was taken", path=self.directory.path)
        file, span = piece.file, ByteSpan(piece.offset, piece.length)
        with file.read(buffer, piece) as data:
            if piece.is_header:
                file.add_header(data)
            else:
                write_all_at(file.target, data, piece.offset)
                if file.is_divided:
                    file.digests[span] = digest_bytes(data)
                elif self._await_turn(piece):
                    file.state.update(data)
                else:
                    return
        with self._changed:
            file.hashed += 0 if piece.is_header else piece.length
            file.copying -= 1
            self.copied += piece.length
            self._changed.notify_all()

    def _await_turn(self, piece: _Piece) -> bool:
        """Wait until all before a piece is hashed; return False if the copy ends first."""
        with self._changed:
            while piece.file.hashed != piece.offset:
                if self._closed or self.failure:
                    return False
                self._changed.wait(_WAIT)
        return True

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self.failure or str(error)
            self._changed.notify_all()


def _cut(size: int) -> Iterator[ByteSpan]:
    for offset in range(0, size, PIECE):
        yield ByteSpan(offset, min(PIECE, size - offset))


def _open_source(attempt_path: str, note: WriteProgress) -> int | None:
    """Open a shard file under the name that it has now; None if it has neither, or is no regular file."""
    for name in (note.temporary, note.name):
        with contextlib.suppress(*MISSING):
            return _open_regular(shard_path(attempt_path, name))
    return None


def _open_regular(path: str) -> int | None:
    try:
        source = os.open(path, _FLAGS | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        source = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        return None
    # Where the cache cannot be passed: it must not hold what was not written yet.
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_RANDOM)
    return source


def _read_through_cache(source: int) -> None:
    fcntl.fcntl(source, fcntl.F_SETFL, fcntl.fcntl(source, fcntl.F_GETFL) & ~os.O_DIRECT)
