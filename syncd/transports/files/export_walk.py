"""One walk over the weights that an engine exports: which rank writes each tensor, and where in its file.

Every rank walks the whole export, because each tensor may be gathered by all of them together; a rank that
fails half-way walks on to the end all the same, or the others would wait for it in their next collective.
"""

import contextlib
import json
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch

from syncd.errors import UsageError
from syncd.protocol.layout import shard_name
from syncd.protocol.safetensors import DTYPE_BITS, METADATA, Tensor, encode_header
from syncd.transports.torch_tensors import FROM_TORCH, memory_of

WORD = 8
"""The widest element. Tensors whose length is a multiple of it leave whatever follows them aligned."""

Named = Iterable[tuple[str, torch.Tensor]]

AnyExport = Named | Callable[[], Named]  # names and tensors, or a function that begins another walk over them


class TensorSpec(NamedTuple):
    """What one tensor is in the file: `dtype` as safetensors calls it, `size` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


class ExportedTensor(NamedTuple):
    """A tensor of this rank's share, not yet cast."""

    spec: TensorSpec  # what it becomes in the file
    tensor: torch.Tensor
    dtype: torch.dtype  # what it becomes
    # Whether it stays valid during the rest of the walk. An export that makes one tensor after the other may
    # reuse the memory of the last one.
    lasts: bool = False


class ExportWalk:
    """Iterates over the tensors that are this rank's, and learns which shard holds every one.

    Each tensor goes to the rank that has the fewest bytes so far. That needs to know nothing in advance and keeps
    nothing from one save to the next, so ranks that walk the same export always agree, also after one of them failed.
    No two ranks differ by more than the largest tensor.

    Args:
        world_size: Number of ranks that write; those behind them only take part in the walk.
        dtype: What floating-point tensors are cast to; None keeps them. Those of one byte are kept always.
        tied: Names to leave out, besides those found to share the storage of another.

    Attributes:
        device: Where the largest tensor is, once planned.
    """

    def __init__(
        self,
        export: AnyExport,
        rank: int,
        world_size: int,
        dtype: torch.dtype | None,
        tied: Collection[str] = (),
    ) -> None:
        tensors = export() if callable(export) else export
        self._tied = frozenset(tied) | tied_names(tensors)
        self._tensors = iter(tensors)
        self._holds_all = self._tensors is not tensors
        self._rank, self._dtype, self._loads = rank, dtype, [0] * world_size
        self.weight_map: dict[str, str] = {}
        self.specs: list[TensorSpec] = []
        self.device = torch.device("cpu")

    @property
    def total_size(self) -> int:
        """Return the bytes met so far, of all ranks."""
        return sum(self._loads)

    def __iter__(self) -> Iterator[ExportedTensor]:
        return self._own(_whole)

    def plan(self) -> None:
        """Walk to the end for `specs`, `weight_map` and `device`: nothing is gathered, no weight is read."""
        largest = -1
        for spec, tensor, _, _ in self._own(torch.Tensor.detach):
            if spec.size > largest:
                largest, self.device = spec.size, tensor.device

    def in_file_order(self) -> Iterator[ExportedTensor]:
        """Iterate in the order of the function `in_file_order`: copies of the odd ones are kept and come last."""
        odd = []
        for exported in self:
            if is_odd(exported.spec):
                odd.append(exported._replace(tensor=exported.tensor.to("cpu", exported.dtype, copy=True)))
            else:
                yield exported
        yield from sorted(odd, key=lambda exported: -exported.dtype.itemsize)

    def finish(self) -> None:
        """Walk to the end for the sake of the other ranks, whatever happens."""
        with contextlib.suppress(Exception):
            for _, tensor in self._tensors:
                _whole(tensor)

    def _own(self, prepared: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[ExportedTensor]:
        for name, tensor in self._tensors:
            if name in self._tied:
                continue
            lasts = self._holds_all or is_spread(tensor)
            exported = self._exported(name, prepared(tensor), lasts=lasts)
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += exported.spec.size
            self.weight_map[name] = shard_name(owner + 1, len(self._loads))
            if owner == self._rank:
                self.specs.append(exported.spec)
                yield exported

    def _exported(self, name: str, tensor: torch.Tensor, *, lasts: bool) -> ExportedTensor:
        if name in self.weight_map:
            raise UsageError(f"the export names tensor {name!r} twice")
        if name == METADATA:
            raise UsageError(f"no tensor can be called {name!r} in a safetensors file")
        dtype = cast_of(tensor.dtype, self._dtype)
        if dtype not in FROM_TORCH:
            raise UsageError(f"tensor {name!r} is {dtype}, which safetensors does not have")
        spec = TensorSpec(name, FROM_TORCH[dtype], tuple(tensor.shape), tensor.numel() * dtype.itemsize)
        return ExportedTensor(spec, tensor, dtype, lasts)


class ShardLayout:
    """Where each byte of one shard goes, decided before the first one is written.

    The data begins at a multiple of `ALIGN`: what is aligned in memory is aligned in the file then, and can be
    written without passing through the page cache.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = in_file_order(specs)
        self.data_size = sum(spec.size for spec in self.specs)
        self.header = encode_header(self.specs)

    @property
    def data_offset(self) -> int:
        return len(self.header)

    @property
    def size(self) -> int:
        return len(self.header) + self.data_size

    def tensors(self) -> Iterator[Tensor]:
        start = 0
        for name, dtype, shape, size in self.specs:
            yield Tensor(name, dtype, shape, start, start + size)
            start += size


def is_odd(spec: TensorSpec) -> bool:
    """Return whether a tensor would leave what follows it misaligned: such tensors go last."""
    return spec.size % WORD != 0


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors as the file has them: as met, but the odd ones last, those of wide elements first.

    The format has no room for padding between tensors, and readers refuse an element that is not aligned.
    """
    ordered = list(specs)
    odd = sorted(filter(is_odd, ordered), key=lambda spec: -DTYPE_BITS[spec.dtype])
    return [spec for spec in ordered if not is_odd(spec)] + odd


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def cast_of(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return what a tensor becomes: only floating-point ones of more than one byte are cast."""
    castable = wanted is not None and stored.is_floating_point and stored.itemsize > 1
    return wanted if wanted is not None and castable else stored


def can_repeat(export: AnyExport) -> bool:
    return callable(export) or iter(export) is not export


def is_spread(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def tied_names(tensors: Named) -> frozenset[str]:
    """Return the names that only repeat the storage of an earlier tensor.

    Only of a collection that holds all its tensors at once. An export that makes them one by one may use
    one piece of memory for two of them, and dropping the second would lose weights: name the tied ones then.
    """
    if not _is_held(tensors):
        return frozenset()
    first: dict[object, str] = {}
    return frozenset(
        name for name, tensor in tensors if first.setdefault(memory_of(tensor) or name, name) != name
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor. If it is spread over ranks, this is a collective."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined] # a DTensor
    assert isinstance(whole, torch.Tensor)
    return whole


def _is_held(tensors: Named) -> TypeGuard[Sequence[tuple[str, torch.Tensor]]]:
    return isinstance(tensors, Sequence | ItemsView)
