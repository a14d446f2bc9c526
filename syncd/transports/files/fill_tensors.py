"""Loads a version from its files into tensors that exist: check that it fits, then fill them.

Threads read pieces of the files and hash them in order. What is read through the page cache goes straight into the
tensors where it can; what is read past it passes through a few MiB of aligned memory.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from syncd.errors import CorruptDataError, LoadFailedError, RefusedError, storage_error
from syncd.protocol.digest import hasher, name_of
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import ALIGN, read_header
from syncd.transports.base import WeightDirectory
from syncd.transports.files.read_file import PIECE, OpenFile, ReadPiece, ReadSource, pieces_of
from syncd.transports.files.read_threads import FileInFlight, ReadTask, ReadThreads, Slot
from syncd.transports.tensors import SUFFIX, Fit, Tensors, compare, require_fit, tensors_of
from syncd.transports.torch_tensors import (
    TargetTensors,
    aligned_memory,
    is_straight,
    put,
    view,
)

THREADS = 4
_BESIDE = 4  # pieces beside those that threads read: they wait to be hashed

_WORD = 8


@dataclass(slots=True)
class LoadCounts:
    """What a load did: bytes read, files read past the page cache, and files read through it."""

    bytes: int = 0
    direct: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class LoadJob:
    sources: Sequence[ReadSource]
    targets: TargetTensors  # the tensors to fill
    offered: Tensors  # dtype and shape of each tensor of the files
    unused: frozenset[str] = frozenset()  # names of the files that are not loaded
    verify: bool = True  # whether each file is hashed and compared with its digest
    # Whether files that are not in the page cache are read past it. Not if several processes of a host read
    # the same file: each would read it from the device.
    direct: bool = True
    threads: int = THREADS  # how many threads read
    piece: int = PIECE  # the most bytes that one of them reads at once

    def target(self, name: str) -> torch.Tensor:
        return self.targets.tensors[self.targets.aliases.get(name, name)]


def check_fit(target: WeightDirectory, targets: TargetTensors, *, cast: bool = True) -> Fit:
    """Compare a version with the tensors that it would fill, from its headers; `cast` allows other float dtypes."""
    try:
        fit = compare(targets.metas, targets.aliases, offered(target), cast=cast)
    except (CorruptDataError, OSError) as error:
        raise RefusedError(f"version {target.label} cannot be read: {error}", path=target.path) from error
    require_fit(fit, f"version {target.label} does not fit the model", path=target.path)
    return fit


def load(target: WeightDirectory, targets: TargetTensors, fit: Fit, *, direct: bool = True) -> LoadCounts:
    """Fill tensors with a version; with `direct`, read past the page cache what is not in it.

    If nothing has verified the version's bytes, they are hashed while they are read, so damage is found only after
    the tensors were written: fill them from the last good version then.
    """
    try:
        sources = tuple(sources_of(target))
        verify = not target.verified
        return read_all(LoadJob(sources, targets, offered(target), fit.unused, verify=verify, direct=direct))
    except (CorruptDataError, OSError, RuntimeError) as error:
        reason = storage_error(error, target.path) if isinstance(error, OSError) else error
        raise LoadFailedError(f"loading {target.label} failed: {reason}") from error


def offered(target: WeightDirectory) -> Tensors:
    """Return dtype and shape of each tensor of a version, from its headers if the target does not list them."""
    if target.tensors:
        return target.tensors
    return tensors_of(read_header(LocalDisk(), source.path) for source in sources_of(target))


def sources_of(target: WeightDirectory) -> Iterator[ReadSource]:
    """Yield the files of a version: those of its records, else every safetensors file of its directory."""
    for record in target.shards:
        yield ReadSource(f"{target.path}/{record.name}", record)
    if not target.shards:
        for name in sorted(os.listdir(target.path)):
            if name.endswith(SUFFIX) and not name.startswith("."):
                yield ReadSource(f"{target.path}/{name}", None)


def read_all(job: LoadJob) -> LoadCounts:
    pinned = any(tensor.device.type == "cuda" for tensor in job.targets.tensors.values())
    size = job.piece + 2 * ALIGN
    slots = [Slot(aligned_memory(size, pinned=pinned)) for _ in range(job.threads + _BESIDE)]
    with contextlib.closing(_Files(job)) as files:
        ReadThreads(files.tasks(), _Destinations(job).read, slots).run(job.threads)
        return files.counts


class _Files:
    """The files of a load, each opened when its first piece is asked for."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._opened: list[OpenFile] = []
        self.counts = LoadCounts()

    def close(self) -> None:
        for file in self._opened:
            file.close()

    def tasks(self) -> Iterator[ReadTask]:
        wanted = self._job.offered.keys() - self._job.unused
        for source in self._job.sources:
            file, count = self._open(source), 0
            pieces = pieces_of(file.file.header, wanted, whole=file.is_hashed, limit=self._job.piece)
            for count, piece in enumerate(pieces, 1):
                yield ReadTask(file, count - 1, piece)
                self.counts.bytes += piece.length
            file.end(count)

    def _open(self, source: ReadSource) -> FileInFlight:
        file = OpenFile(source, direct=self._job.direct)
        self._opened.append(file)
        file.require_tensors(self._job.offered)
        record = source.record if self._job.verify else None
        self.counts.direct += file.is_direct
        self.counts.cached += not file.is_direct
        return FileInFlight(file, hasher(name_of(record.digest)) if record else None)


class _Straight(NamedTuple):
    """The memory of a tensor whose bytes are those of the file: they are read or copied straight into it."""

    bytes: memoryview
    address: int


class _Destinations:
    """Brings pieces to their tensors by what was looked up before: Python's lock lets only one thread compute."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._straight: dict[str | None, _Straight] = {}
        for name, meta in job.offered.items():
            tensor = job.target(name)
            if tensor.nbytes and is_straight(tensor, meta.dtype):
                self._straight[name] = _Straight(view(tensor), tensor.data_ptr())

    def read(self, file: OpenFile, piece: ReadPiece, slot: Slot) -> None:
        if file.is_direct:
            self._read_direct(file, piece, slot)
        else:
            self._read_cached(file, piece, slot)

    def _read_direct(self, file: OpenFile, piece: ReadPiece, slot: Slot) -> None:
        start = file.read_direct(piece, slot.bytes)
        slot.views = [slot.bytes[start : start + piece.length]]
        for part in piece.parts:
            straight = self._straight.get(part.name)
            if straight is not None:
                # Without Python's lock, and without waking torch's threads.
                ctypes.memmove(straight.address + part.start, slot.address + start, part.length)
            elif part.name is not None:
                self._put(part.name, part.start, slot.memory[start : start + part.length])
            start += part.length

    def _read_cached(self, file: OpenFile, piece: ReadPiece, slot: Slot) -> None:
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
                self._put(part.name, part.start, content)

    def _put(self, name: str, start: int, content: torch.Tensor) -> None:
        put(self._job.target(name), self._job.offered[name].dtype, start, content)
