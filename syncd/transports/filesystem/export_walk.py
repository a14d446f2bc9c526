"""One walk over the weights that an engine exports, as one of its ranks.

Every rank walks the whole export, because each tensor may be gathered by all of them together; a rank that
fails half-way walks on to the end all the same, or the others would wait for it in their next collective.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch

from syncd.errors import UsageError
from syncd.protocol.layout import shard_name
from syncd.transports.filesystem.layout import METADATA, Spec, is_odd
from syncd.transports.filesystem.sharding import Named, Shares, tied_names

Export = Named | Callable[[], Named]
"""Names and tensors, or a function that starts the walk over them anew."""

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
"""What safetensors calls each dtype."""


class Piece(NamedTuple):
    """A tensor of this rank's share, not yet cast.

    Args:
        spec: What it becomes in the file.
        tensor: The whole of it.
        dtype: What it becomes.
        lasts: Whether it stays as it is while the walk goes on. An export that makes one tensor after the other may
            use the memory of the last one again.
    """

    spec: Spec
    tensor: torch.Tensor
    dtype: torch.dtype
    lasts: bool = False


class Walk:
    """Iterates over the tensors that are this rank's, and learns which shard holds every one.

    Args:
        export: What the engine exports.
        rank: This rank.
        world_size: Number of ranks.
        dtype: What floating-point tensors are cast to; None keeps them. Those of one byte are kept always.
        tied: Names to leave out, besides those found to share the storage of another.

    Attributes:
        device: Where the largest tensor is, once planned.
    """

    def __init__(
        self,
        export: Export,
        rank: int,
        world_size: int,
        dtype: torch.dtype | None,
        tied: Collection[str] = (),
    ) -> None:
        tensors = export() if callable(export) else export
        self._tied = frozenset(tied) | tied_names(tensors)
        self._tensors = iter(tensors)
        self._holds_all = self._tensors is not tensors
        self._rank, self._dtype, self._shares = rank, dtype, Shares(world_size)
        self.weight_map: dict[str, str] = {}
        self.specs: list[Spec] = []
        self.device = torch.device("cpu")

    @property
    def total_size(self) -> int:
        """Return the bytes met so far, of all ranks."""
        return sum(self._shares.loads)

    def __iter__(self) -> Iterator[Piece]:
        return self._mine(_whole)

    def plan(self) -> None:
        """Walk to the end for `specs`, `weight_map` and `device`: nothing is gathered, no weight is looked at."""
        largest = -1
        for piece in self._mine(torch.Tensor.detach):
            if piece.spec.size > largest:
                largest, self.device = piece.spec.size, piece.tensor.device

    def _mine(self, made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Piece]:
        for name, tensor in self._tensors:
            if name in self._tied:
                continue
            piece = self._piece(name, made(tensor), lasts=self._holds_all or is_spread(tensor))
            owner = self._shares.deal(piece.spec.size)
            self.weight_map[name] = shard_name(owner + 1, len(self._shares.loads))
            if owner == self._rank:
                self.specs.append(piece.spec)
                yield piece

    def in_file_order(self) -> Iterator[Piece]:
        """Iterate in the order of `headers.in_file_order`: copies of the odd ones are kept and come last."""
        odd = []
        for piece in self:
            if is_odd(piece.spec):
                odd.append(piece._replace(tensor=piece.tensor.to("cpu", piece.dtype, copy=True)))
            else:
                yield piece
        yield from sorted(odd, key=lambda piece: -piece.dtype.itemsize)

    def finish(self) -> None:
        """Walk on to the end for the sake of the other ranks, whatever happens."""
        with contextlib.suppress(Exception):
            for _, tensor in self._tensors:
                _whole(tensor)

    def _piece(self, name: str, tensor: torch.Tensor, *, lasts: bool) -> Piece:
        if name in self.weight_map:
            raise UsageError(f"the export names tensor {name!r} twice")
        if name == METADATA:
            raise UsageError(f"no tensor can be called {name!r} in a safetensors file")
        dtype = self._cast(tensor)
        if dtype not in DTYPES:
            raise UsageError(f"tensor {name!r} is {dtype}, which safetensors does not have")
        size = tensor.numel() * dtype.itemsize
        return Piece(Spec(name, DTYPES[dtype], tuple(tensor.shape), size), tensor, dtype, lasts)

    def _cast(self, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            return tensor.dtype
        return self._dtype


def can_repeat(export: Export) -> bool:
    """Say whether a walk over it can be started twice."""
    return callable(export) or iter(export) is not export


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be spread over ranks: a collective, where it is."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined] # a DTensor
    assert isinstance(whole, torch.Tensor)
    return whole


def is_spread(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is one of several ranks together: the whole of it is made by gathering."""
    return hasattr(tensor, "full_tensor")
