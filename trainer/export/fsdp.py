"""Weights in the files of FSDP's ranks, as verl's checkpoint manager writes them, made whole again.

Each rank's file is mapped, not read, and opened with `weights_only`: no code that it may hold is run. verl's
own merger loads all files at once, runs what they pickle, and knows only bf16.
"""

import contextlib
import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from syncd.errors import ConfigError, CorruptDataError, NotReadyError
from syncd.protocol.disk import Disk, list_if_there
from syncd.transports.files.export_walk import tied_names
from trainer.export.weights import TensorKind
from trainer.safe_unpickle import RUNS_CODE

_FILE = re.compile(r"model_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt", re.ASCII)
_ADAPTER = "lora_"
_MERGER = "python -m verl.model_merger merge --backend fsdp --local_dir {} --target_dir OUT"

Region = tuple[slice, ...]


def has_fsdp_files(disk: Disk, directory: str) -> bool:
    return any(_FILE.fullmatch(entry.name) for entry in list_if_there(disk, directory))


class FsdpFiles:
    """Weights spread over `model_world_size_<W>_rank_<R>.pt`; with `adapters` they must be of adapters alone."""

    def __init__(self, disk: Disk, directory: str, *, adapters: bool = False) -> None:
        self._directory = directory
        paths = [f"{directory}/{name}" for name in rank_files(disk, directory)]
        self._ranks = [_load(path) for path in paths]
        first = self._ranks[0]
        for path, tensors in zip(paths, self._ranks, strict=True):
            if tensors.keys() != first.keys():
                raise CorruptDataError("its tensors are not those of rank 0", path=path)
        if adapters and not all(_ADAPTER in name for name in first):
            raise CorruptDataError("the ranks' files hold more than adapters", path=directory)
        if not adapters and any(_ADAPTER in name for name in first):
            raise ConfigError(
                "the ranks' files hold adapters", path=directory, hint=_MERGER.format(directory)
            )
        tied = tied_names(list(first.items()))
        self.kinds = {
            name: TensorKind(tensor.dtype, tuple(tensor.shape))
            for name, tensor in first.items()
            if name not in tied
        }

    def read(self, name: str) -> torch.Tensor:
        parts = [rank[name] for rank in self._ranks]
        try:
            return _whole(parts)
        except ValueError as error:
            raise CorruptDataError(f"tensor {name!r}: {error}", path=self._directory) from None


def rank_files(disk: Disk, directory: str) -> list[str]:
    """Return the names of all ranks' files, in the order of the ranks."""
    by_world_size: dict[int, dict[int, str]] = {}
    for entry in list_if_there(disk, directory):
        if match := _FILE.fullmatch(entry.name):
            by_world_size.setdefault(int(match[1]), {})[int(match[2])] = entry.name
    if len(by_world_size) != 1:
        sizes = ", ".join(map(str, sorted(by_world_size))) or "none"
        raise CorruptDataError(f"rank files of one world size are needed; there are: {sizes}", path=directory)
    ((world_size, names),) = by_world_size.items()
    if len(names) < world_size:
        raise NotReadyError(f"only {len(names)} of {world_size} ranks' files exist", path=directory)
    return [names[rank] for rank in range(world_size)]


def _load(path: str) -> Mapping[str, torch.Tensor]:
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):  # torch would call it an invalid argument
            raise CorruptDataError("not a complete file of torch.save", path=path)
    try:
        with without_warning():
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            RUNS_CODE,
            path=path,
            hint=f"if you trust it: {_MERGER.format(path.rpartition('/')[0])}",
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CorruptDataError("not a complete file of torch.save", path=path) from error
    if not isinstance(tensors, Mapping) or not tensors or not _all_tensors(tensors):
        raise CorruptDataError("the file holds no tensors by name", path=path)
    return tensors


def _all_tensors(tensors: Mapping[object, object]) -> bool:
    return all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items())


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """Leave out torch's remark on each tensor that a mesh was unpickled without process groups."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor of the parts of all ranks; `ValueError` if they do not make one."""
    first = parts[0]
    if not isinstance(first, DTensor):
        # What FSDP leaves alone, such as buffers, each rank has whole.
        if not all(type(part) is type(first) and torch.equal(part, first) for part in parts):
            raise ValueError("not spread over the ranks, and not the same on all")
        return first.detach()
    whole = torch.empty(first.shape, dtype=first.dtype)
    for rank, part in enumerate(parts):
        _require_alike(first, part, len(parts))
        assert isinstance(part, DTensor)
        region = region_of(tuple(first.shape), part.device_mesh.mesh, part.placements, rank)
        local = part.to_local().detach()
        if whole[region].shape != local.shape:
            raise ValueError(f"rank {rank} has {list(local.shape)} where {list(whole[region].shape)} belongs")
        whole[region].copy_(local)
    return whole


def _require_alike(first: DTensor, part: torch.Tensor, world_size: int) -> None:
    if not isinstance(part, DTensor) or (part.shape, part.dtype) != (first.shape, first.dtype):
        raise ValueError("not the same tensor on all ranks")
    mesh = part.device_mesh.mesh
    if part.placements != first.placements or not torch.equal(mesh, first.device_mesh.mesh):
        raise ValueError("not spread in the same way by all ranks")
    if sorted(mesh.flatten().tolist()) != list(range(world_size)):
        raise ValueError(f"spread over ranks {mesh.tolist()}, and there are {world_size}")


def region_of(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: Sequence[Placement], rank: int
) -> Region:
    """Return which part of a whole tensor, spread over the ranks of a mesh by placements, a rank holds."""
    starts, sizes = [0] * len(shape), list(shape)
    coordinates = (mesh == rank).nonzero()[0].tolist()
    for placement, count, position in zip(placements, mesh.shape, coordinates, strict=True):
        if type(placement) is Shard:
            # As torch.chunk cuts: all but the last pieces are of one size, and the last may be empty.
            axis = placement.dim
            piece = -(-sizes[axis] // count)
            start = min(position * piece, sizes[axis])
            starts[axis] += start
            sizes[axis] = min(piece, sizes[axis] - start)
        elif type(placement) is not Replicate:
            raise ValueError(f"{placement} is not supported")
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
