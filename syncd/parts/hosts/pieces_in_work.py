"""The files that pieces are written into, and who may write which piece now.

A piece that was asked of a second host may still come from the first. Only the attempt that claimed it last writes
it, and none does once it is proven, so bytes of a late or wrong host never change a proven piece.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping

from syncd.parts.hosts.pieces import Piece, PiecePlan, PieceProof
from syncd.parts.hosts.shelf import LivePieces
from syncd.protocol.local_disk import write_all_at
from syncd.transports.files.copy_files import is_moved
from syncd.transports.files.piece_reader import ByteSpan, PartialFile

_LOCKS = 64


class SupersededError(Exception):
    """Another attempt has claimed the piece, it is proven, or all is over."""


class Claim:
    """One attempt to get one piece."""

    def __init__(self, work: "PiecesInWork", number: int, identity: int) -> None:
        self._work, self._number, self._identity = work, number, identity
        piece = work.plan.pieces[number]
        self._at, self._proof = piece.offset, PieceProof(piece)

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes of the piece."""
        self._work.write_claimed(self._number, self._identity, chunk, self._at)
        self._proof.feed(chunk)
        self._at += len(chunk)

    def finish(self) -> bool:
        """Return whether the bytes match their digests; then the piece is proven."""
        if not self._proof.is_proven():
            return False
        self._work.prove(self._number, self._identity)
        return True


class PiecesInWork:
    """The files of a plan below a directory, with the marks of what is proven.

    Args:
        target: The directory, which is there.
        proven: Called with each piece that is proven from now on.
        partial: Files that are moved there, by name; what matches of them is proven at once.
    """

    def __init__(
        self,
        plan: PiecePlan,
        target: str,
        live: LivePieces,
        proven: Callable[[int], None],
        partial: Mapping[str, PartialFile],
    ) -> None:
        self.plan, self._live, self._proven = plan, live, proven
        self._claims: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        planned = {file.name: partial[file.name] for file in plan.files if file.name in partial}
        moved = {name: file for name, file in planned.items() if is_moved(file.path, f"{target}/{name}")}
        self._files = list[int]()
        with contextlib.ExitStack() as unfinished:
            unfinished.callback(self.close)
            for file in plan.files:
                descriptor = _open_file(f"{target}/{file.name}", is_new=file.name not in moved)
                self._files.append(descriptor)
                os.truncate(descriptor, file.size)
            unfinished.pop_all()
        for number, piece in enumerate(plan.pieces):
            copied = moved.get(plan.files[piece.file].name)
            if copied is not None and _matches(piece, copied):
                live.mark(number)

    def has(self, number: int) -> bool:
        return self._live.marks[number] == 1

    def claim(self, number: int) -> Claim:
        """Claim a piece; whoever had claimed it writes no more of it."""
        with self._locks[number % _LOCKS]:
            if self.has(number):
                raise SupersededError
            identity = self._claims[number] = next(self._numbers)
            return Claim(self, number, identity)

    def write_claimed(self, number: int, identity: int, chunk: memoryview, offset: int) -> None:
        with self._locks[number % _LOCKS]:
            self._require(number, identity)
            write_all_at(self._files[self.plan.pieces[number].file], chunk, offset)

    def write_own(self, file: int, chunk: memoryview, offset: int) -> None:
        """Write bytes that are no piece."""
        with self._locks[0]:
            if not self._files:
                raise SupersededError
            write_all_at(self._files[file], chunk, offset)

    def prove(self, number: int, identity: int) -> None:
        with self._locks[number % _LOCKS]:
            self._require(number, identity)
            self._live.mark(number)
        self._proven(number)

    def close(self) -> None:
        """Write nothing more, whoever still tries."""
        with contextlib.ExitStack() as writing:
            for lock in self._locks:
                writing.enter_context(lock)
            files, self._files = self._files, []
        for descriptor in files:
            os.close(descriptor)

    def _require(self, number: int, identity: int) -> None:
        if not self._files or self.has(number) or self._claims[number] != identity:
            raise SupersededError


def _matches(piece: Piece, file: PartialFile) -> bool:
    digest = file.digests.get(ByteSpan(piece.offset, piece.length))
    return [f"{part.kind}:{part.digest}" for part in piece.parts] == [digest]


def _open_file(path: str, *, is_new: bool) -> int:
    flags = os.O_CREAT | os.O_EXCL if is_new else 0
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
