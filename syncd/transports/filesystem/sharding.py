"""Who writes what: whole tensors dealt out to the ranks, the same on each, without a word between them."""

from collections.abc import ItemsView, Iterable, Sequence
from typing import TypeGuard

import torch

Named = Iterable[tuple[str, torch.Tensor]]


class Shares:
    """Deals tensors out as they come: each one goes to the rank that has the fewest bytes so far.

    It needs to know nothing in advance and keeps nothing from one save to the next, so ranks that walk the
    same export always agree, also after one of them failed. No two differ by more than the largest tensor.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.loads = [0] * world_size

    def deal(self, size: int) -> int:
        """Return the rank that takes a tensor of `size` bytes."""
        rank = self.loads.index(min(self.loads))
        self.loads[rank] += size
        return rank


def tied_names(tensors: Named) -> frozenset[str]:
    """Return the names that only repeat the storage of an earlier tensor.

    Only of a collection that holds all its tensors at once. An export that makes them one by one may use
    one piece of memory for two of them, and dropping the second would lose weights: name the tied ones then.
    """
    if not _is_held(tensors):
        return frozenset()
    seen: set[tuple[object, ...]] = set()
    tied = set()
    for name, tensor in tensors:
        place = _place(tensor)
        if place is None:
            continue
        if place in seen:
            tied.add(name)
        seen.add(place)
    return frozenset(tied)


def _is_held(tensors: Named) -> TypeGuard[Sequence[tuple[str, torch.Tensor]]]:
    return isinstance(tensors, Sequence | ItemsView)


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return where the elements are, None for a tensor that has no memory.

    Of a sharded tensor it is where this rank's part is, or would be: ranks without a part of it must find the same
    as the others, and all empty tensors have the same address. FSDP keeps padding for them, in a storage of its own.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    storage = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    if not storage:
        return None
    return (
        str(tensor.device), storage, tensor.storage_offset(),
        tensor.dtype, tuple(tensor.shape), tensor.stride(),
    )  # fmt: skip
