"""Puts versions that are stored as changes straight into the parameters of this process, tile by tile.

If the parameters hold the step that the changes begin with, their own memory is read in place of its files: the
digest before of each tile proves it. All tiles are made and proved once before any parameter is touched. Otherwise
the keyframe and all deltas are read from the job.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from syncd.errors import CorruptDataError, LoadFailedError, RefusedError
from syncd.protocol.delta import Tile
from syncd.protocol.layout import ACTOR
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header, parse_header, read_header
from syncd.transports.base import StoredChanges, WeightDirectory
from syncd.transports.delta.chain import BaseDamagedError, Chain, WholeFiles
from syncd.transports.files import fill_tensors
from syncd.transports.files.copy_files import several_at_once
from syncd.transports.files.fill_tensors import LoadCounts
from syncd.transports.tensors import Fit
from syncd.transports.torch_tensors import TargetTensors, is_straight, put, view

Layouts = Mapping[str, "_ShardLayout"]
"""The layout of each shard file, by its name in the directory that engines load."""


class _Part(NamedTuple):
    """A range of a tile that belongs to one tensor: its place in the tile, first byte in the tensor, and bytes."""

    name: str
    at: int
    start: int
    length: int


class _ShardLayout:
    """Which bytes of a shard file belong to which tensor; `head` has the bytes before its data."""

    def __init__(self, head: bytes, header: Header) -> None:
        self.head, self.header = head, header
        self._tensors = [tensor for tensor in header.tensors.values() if tensor.end > tensor.start]
        self._ends = [tensor.end for tensor in self._tensors]

    def parts(self, tile: Tile) -> Iterator[_Part]:
        begin, end = (
            tile.offset - self.header.data_offset,
            tile.offset - self.header.data_offset + tile.length,
        )
        for tensor in self._tensors[bisect_right(self._ends, max(begin, 0)) :]:
            if tensor.start >= end:
                return
            first, last = max(tensor.start, begin), min(tensor.end, end)
            yield _Part(tensor.name, first - begin, first - tensor.start, last - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterFiles(WholeFiles):
    """The files of the step that parameters hold, as far as changes begin with them: read from the parameters."""

    layouts: Layouts
    targets: TargetTensors

    def read(self, record: FileRecord, tile: Tile, memory: memoryview) -> None:
        """Read one tile; the bytes before the data are kept, since no tensor holds them."""
        layout = self.layouts[_short(record)]
        if tile.offset < layout.header.data_offset:
            memory[:] = layout.head[tile.offset : tile.offset + tile.length]
        for part in layout.parts(tile):
            held = view(_tensor(self.targets, part.name))
            memory[part.at : part.at + part.length] = held[part.start : part.start + part.length]


class _Proof(NamedTuple):
    """A version that was made of the parameters once, every byte of it proved, and has yet to be put into them."""

    digest: str
    chain: Chain
    targets: TargetTensors


class ParameterVersion:
    """Knows which version the parameters of a model hold, and puts the next one into them.

    Used by one thread. Whoever changes the parameters otherwise makes a new one; a change without it is found by the
    digests. `whole` is the version that they hold, if it was filled from whole files; its headers are read when
    changes need them.
    """

    def __init__(self, whole: WeightDirectory | None = None) -> None:
        self._digest = whole.version.digest if whole else ""
        self._whole = whole
        self._layouts: Layouts = {}
        self._proof: _Proof | None = None

    def prepare(self, target: WeightDirectory, targets: TargetTensors, fit: Fit) -> None:
        """Make a version of what the parameters hold, if it is stored as changes of that; nothing is written."""
        self._proof = None
        changes = target.changes
        links = self._links(changes) if changes else ()
        if changes is None or not links:
            return
        if self._whole is not None:
            self._layouts, self._whole = _layouts_of(self._whole), None
        if not self._can_read(targets, fit):
            return
        try:
            memory = _ParameterFiles(
                changes.job.disk, "parameters", is_copy=True, layouts=self._layouts, targets=targets
            )
            chain = Chain(changes.job, links, memory)
            _each(chain, _read_through)
        except BaseDamagedError:
            self._digest = ""
        except (CorruptDataError, OSError) as error:
            if links[-1].delta is None:
                return  # a shortcut that cannot be used: the shards are whole
            raise RefusedError(f"version {target.label} cannot be read: {error}", path=target.path) from error
        else:
            self._proof = _Proof(target.version.digest, chain, targets)

    def load(
        self, target: WeightDirectory, targets: TargetTensors, fit: Fit, *, direct: bool = True
    ) -> LoadCounts:
        """Fill parameters with a version: as changes if `prepare` has proved them, else whole."""
        proof = self._proof
        self._digest, self._proof = "", None
        if proof is not None and proof.digest == target.version.digest:
            counts = _fill(target, proof.chain, self._layouts, proof.targets, fit)
        elif target.changes is not None and target.changes.manifests[0].delta is not None:
            counts = self._fill_whole(target, target.changes, targets, fit)
        else:
            counts = fill_tensors.load(target, targets, fit, direct=direct)
            self._whole = target
        self._digest = target.version.digest
        return counts

    def _fill_whole(
        self, target: WeightDirectory, changes: StoredChanges, targets: TargetTensors, fit: Fit
    ) -> LoadCounts:
        try:
            chain = Chain(changes.job, changes.manifests)
            self._layouts = {_short(record): _layout(chain.head(record), record) for record in _shards(chain)}
            self._whole = None
        except (CorruptDataError, OSError) as error:
            raise LoadFailedError(f"loading {target.label} failed: {error}") from error
        return _fill(target, chain, self._layouts, targets, fit)

    def _links(self, changes: StoredChanges) -> Sequence[Manifest]:
        """Return the manifests down to the one that changes what the parameters hold, none if none does."""
        for count, manifest in enumerate(changes.manifests, 1):
            if self._digest and manifest.changes and manifest.changes.parent_digest == self._digest:
                return changes.manifests[:count]
        return ()

    def _can_read(self, targets: TargetTensors, fit: Fit) -> bool:
        """Return whether the bytes of the files are those of the parameters."""
        tensors = [tensor for layout in self._layouts.values() for tensor in layout.header.tensors.values()]
        is_whole = tensors and not any(tensor.name in fit.unused for tensor in tensors)
        return bool(is_whole) and all(
            is_straight(_tensor(targets, tensor.name), tensor.dtype) for tensor in tensors
        )


def _read_through(tiles: Iterator[tuple[Tile, memoryview]], record: FileRecord) -> None:
    del record
    for _ in tiles:
        pass


def _fill(
    target: WeightDirectory, chain: Chain, layouts: Layouts, targets: TargetTensors, fit: Fit
) -> LoadCounts:
    counts = LoadCounts()

    def write(tiles: Iterator[tuple[Tile, memoryview]], record: FileRecord) -> None:
        layout = layouts[_short(record)]
        for tile, data in tiles:
            if tile.offset >= layout.header.data_offset:
                _put(layout, tile, data, targets, fit)

    try:
        _each(chain, write)
    except (CorruptDataError, OSError, RuntimeError) as error:
        raise LoadFailedError(f"loading {target.label} failed: {error}") from error
    counts.bytes = sum(record.size for record in _shards(chain))
    return counts


def _put(layout: _ShardLayout, tile: Tile, data: memoryview, targets: TargetTensors, fit: Fit) -> None:
    content = torch.frombuffer(data, dtype=torch.uint8)
    for part in layout.parts(tile):
        if part.name not in fit.unused:
            dtype = layout.header.tensors[part.name].dtype
            put(_tensor(targets, part.name), dtype, part.start, content[part.at : part.at + part.length])


def _each(chain: Chain, work: Callable[[Iterator[tuple[Tile, memoryview]], FileRecord], object]) -> None:
    several_at_once(_shards(chain), lambda record, _: work(chain.tiles(record), record), lambda: False)


def _shards(chain: Chain) -> Sequence[FileRecord]:
    return chain.manifest.whole_shards


def _layouts_of(target: WeightDirectory) -> Layouts:
    """Return the layouts of the files of a version; none if they cannot be read now."""
    disk, layouts = LocalDisk(), dict[str, _ShardLayout]()
    try:
        for record in target.shards:
            path = f"{target.path}/{record.name}"
            header = read_header(disk, path)
            layouts[record.name] = _ShardLayout(disk.read_at(path, 0, header.data_offset), header)
    except (CorruptDataError, OSError):
        return {}
    return layouts


def _layout(head: bytes, record: FileRecord) -> _ShardLayout:
    return _ShardLayout(head, parse_header(head, record.size, record.name))


def _tensor(targets: TargetTensors, name: str) -> torch.Tensor:
    return targets.tensors[targets.aliases.get(name, name)]


def _short(record: FileRecord) -> str:
    return record.name.removeprefix(f"{ACTOR}/")
