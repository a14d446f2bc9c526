"""Reads JSON lines that another process appends to a file: each line once, some megabytes at a time.

The file may be rotated (its name is another's, and it has the name that its reader knows as older), truncated or
replaced. A line that is no document, or too long, costs itself only.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from syncd.jsonl import LINE_LIMIT, document_in
from syncd.safe_open import open_read

_HEAD = 256  # bytes at the beginning of a file by which it is told from the next one that gets its inode


class Collector(Protocol):
    """Gets each document once, in order."""

    def add(self, document: Mapping[str, Any]) -> None:
        """Take one document; it may hold anything."""


C = TypeVar("C", bound=Collector)


@dataclass(slots=True)
class _FileProgress:
    inode: int
    head: bytes
    offset: int = 0
    size: int = 0
    in_long_line: bool = False


class GrowingFiles(Generic[C]):
    """Gives every line of a file, and of the files that it was before its rotation, to a collector.

    `paths` are the file and then its rotated ones, the newest first. The collector is made anew, and all is read
    again, if a file was truncated or replaced.
    """

    def __init__(self, paths: Sequence[str], collector: Callable[[], C]) -> None:
        self._paths, self._collector = paths, collector
        self._files: list[_FileProgress] = []
        self._start_over()

    @property
    def name(self) -> str:
        return os.path.basename(self._paths[0])

    @property
    def size(self) -> int:
        """Return the bytes of all files when they were last opened."""
        return sum(file.size for file in self._files)

    @property
    def done(self) -> int:
        return sum(file.offset for file in self._files)

    def read(self, most: int) -> int:
        """Read up to so many bytes more; return how many were read."""
        with contextlib.ExitStack() as stack:
            opened = self._open_all(stack)
            if self._must_start_over(opened):
                self._start_over()
                opened = [(self._identified(descriptor), descriptor) for _, descriptor in opened]
            self._files = [file for file, _ in opened]
            before = self.done
            for file, descriptor in opened:
                if (left := most - (self.done - before)) > 0:
                    self._read(file, descriptor, left)
            return self.done - before

    def _start_over(self) -> None:
        self.collected = self._collector()
        self.ignored = 0
        self._files = []

    def _open_all(self, stack: contextlib.ExitStack) -> list[tuple[_FileProgress, int]]:
        """Return the files that are there, the oldest first.

        They are opened with the newest first: if one is renamed meanwhile, it is found twice, and never missed.
        """
        opened: list[tuple[_FileProgress, int]] = []
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                descriptor = open_read(path)
                stack.callback(os.close, descriptor)
                file = self._identified(descriptor)
                if all(other.inode != file.inode for other, _ in opened):
                    opened.insert(0, (file, descriptor))
        return opened

    def _identified(self, descriptor: int) -> _FileProgress:
        """Return what is known of an open file, nothing if it was never read."""
        stat, head = os.fstat(descriptor), os.pread(descriptor, _HEAD, 0)
        for file in self._files:
            if file.inode == stat.st_ino and head.startswith(file.head):
                file.head, file.size = head, stat.st_size
                return file
        return _FileProgress(stat.st_ino, head, size=stat.st_size)

    def _must_start_over(self, opened: Sequence[tuple[_FileProgress, int]]) -> bool:
        """Return whether lines that were read may be in no file any more, or are to be read again."""
        still = [file for file, _ in opened if file in self._files]
        return any(file.size < file.offset for file in still) or (bool(self._files) and not still)

    def _read(self, file: _FileProgress, descriptor: int, most: int) -> None:
        ends = file.offset + most
        for line in _whole_lines(file, descriptor):
            document = document_in(line) if line else None
            if document is not None:
                self.collected.add(document)
            elif line.strip() or not line:
                self.ignored += 1
            if file.offset >= ends:
                break


def _whole_lines(progress: _FileProgress, descriptor: int) -> Iterator[bytes]:
    """Yield each line that is ended, and an empty one for a line that is too long; note how far that is."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(progress.offset)
        while piece := file.readline(LINE_LIMIT):
            is_end = piece.endswith(b"\n")
            if not is_end and len(piece) < LINE_LIMIT and not progress.in_long_line:
                return  # its writer has not ended it yet
            progress.offset += len(piece)
            is_first, progress.in_long_line = not progress.in_long_line, not is_end
            if is_first:
                yield piece if is_end else b""
