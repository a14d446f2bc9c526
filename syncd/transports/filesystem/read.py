"""The thin shell of loading: reads pieces with threads, hashes them in order, and copies what did not go straight.

What is read through the page cache goes right into the parameters; what is read past it, through aligned memory of a
few MiB.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from syncd.protocol.digest import hasher, name_of
from syncd.transports.filesystem.read_file import OpenFile, Source
from syncd.transports.filesystem.read_plan import PIECE, Part, Piece, pieces_of, same
from syncd.transports.filesystem.read_targets import ALIGN, Held, bounce, is_straight, put, view
from syncd.transports.filesystem.read_threads import Lanes, Reading, Slot, Task
from syncd.transports.tensors import TensorMeta

THREADS = 4
_BESIDE = 4
"""Pieces beside those that threads read: they wait for their turn to be hashed."""

_WORD = 8


@dataclass(slots=True)
class Loaded:
    """What a load did: bytes read, and how many files were read directly and how many through the page cache."""

    bytes: int = 0
    direct: int = 0
    cached: int = 0


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
        piece: The most bytes that one of them reads at once.
    """

    sources: Sequence[Source]
    held: Held
    offered: Mapping[str, TensorMeta]
    unused: frozenset[str] = frozenset()
    verify: bool = True
    direct: bool = True
    threads: int = THREADS
    piece: int = PIECE

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
    slots = [Slot(bounce(job.piece + 2 * ALIGN, pinned=pinned)) for _ in range(job.threads + _BESIDE)]
    with contextlib.closing(_Files(job)) as files:
        Lanes(files.tasks(), _Places(job).take, slots).run(job.threads)
        return files.loaded


class _Files:
    """The files of a load, each opened when its first piece is asked for."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: list[OpenFile] = []
        self.loaded = Loaded()

    def close(self) -> None:
        """Close what a load that broke off has left open."""
        for file in self._opened:
            file.close()

    def tasks(self) -> Iterator[Task]:
        """Yield the pieces of all files, in order."""
        wanted = {name: None for name in self._job.offered if name not in self._job.unused}
        for source in self._job.sources:
            reading, count = self._open(source), 0
            pieces = pieces_of(reading.file.header, wanted, whole=reading.is_hashed, limit=self._job.piece)
            for count, piece in enumerate(pieces, 1):
                yield Task(reading, count - 1, piece)
                self.loaded.bytes += piece.length
            reading.end(count)

    def _open(self, source: Source) -> Reading:
        file = OpenFile(source, direct=self._job.direct)
        self._opened.append(file)
        same(file.header, self._job.offered)
        record = source.record if self._job.verify else None
        self.loaded.direct += file.is_direct
        self.loaded.cached += not file.is_direct
        return Reading(file, hasher(name_of(record.digest)) if record else None)


class _Straight(NamedTuple):
    """The memory of a tensor whose bytes are those of the file: read, or copied, right there."""

    bytes: memoryview
    address: int


class _Places:
    """Brings pieces to where they belong.

    What is asked for each piece is looked up, not made: with Python's lock held there is one thread, not four.

    Args:
        job: What belongs where.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._straight: dict[str | None, _Straight] = {}
        for name, meta in job.offered.items():
            tensor = job.target(name)
            if tensor.nbytes and is_straight(tensor, meta.dtype):
                self._straight[name] = _Straight(view(tensor), tensor.data_ptr())

    def take(self, file: OpenFile, piece: Piece, slot: Slot) -> None:
        """Read one piece and bring it to where it belongs, in a thread."""
        if file.is_direct:
            self._take_direct(file, piece, slot)
        else:
            self._take_cached(file, piece, slot)

    def _take_direct(self, file: OpenFile, piece: Piece, slot: Slot) -> None:
        start = file.read_direct(piece, slot.bytes)
        slot.views = [slot.bytes[start : start + piece.length]]
        for part in piece.parts:
            straight = self._straight.get(part.name)
            if straight is not None:
                # Without Python's lock, and without waking torch's threads.
                ctypes.memmove(straight.address + part.start, slot.address + start, part.length)
            elif part.name is not None:
                self._put(part.name, part, slot.memory[start : start + part.length])
            start += part.length

    def _take_cached(self, file: OpenFile, piece: Piece, slot: Slot) -> None:
        through, used = [], 0
        for part in piece.parts:
            straight = self._straight.get(part.name)
            if straight is not None:
                slot.views.append(straight.bytes[part.start : part.start + part.length])
                continue
            end = used + part.length
            slot.views.append(slot.bytes[used:end])
            through.append((part, slot.memory[used:end]))
            used = -(-end // _WORD) * _WORD
        file.read_into(piece.offset, list(slot.views))
        for part, content in through:
            if part.name is not None:
                self._put(part.name, part, content)

    def _put(self, name: str, part: Part, content: torch.Tensor) -> None:
        put(self._job.target(name), self._job.offered[name].dtype, part, content)
