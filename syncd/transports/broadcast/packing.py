"""Packs the tensors of an export into the buckets of a broadcast, in memory that is allocated once."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from syncd.errors import CorruptDataError
from syncd.protocol.buckets import BucketPlan
from syncd.transports.filesystem.export_walk import ExportedTensor, ExportWalk
from syncd.transports.torch_tensors import DeviceFiniteCheck

CPU = torch.device("cpu")

Room = tuple[torch.Tensor, torch.Tensor]
"""Two buckets: one is filled while the other is sent."""


class Packer:
    """Fills two buckets in turn, in memory that it owns.

    Args:
        check_finite: Whether to refuse NaN and infinity.
    """

    def __init__(self, *, check_finite: bool) -> None:
        self._check = check_finite
        self._room: Room | None = None

    def buckets(self, plan: BucketPlan, walk: ExportWalk, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield the buckets of a walk, on a device; each is valid until the next but one is requested.

        Raises:
            CorruptDataError: The tensors are not those of the plan, or one holds NaN or infinity. On a device
                the latter is known only after the last bucket.
        """
        finite = DeviceFiniteCheck()
        yield from fill(plan, self._pieces(walk, device, finite), self._room_for(plan, device))
        finite.require()

    def drop(self) -> None:
        """Drop the memory: a broadcast that failed may still read it."""
        self._room = None

    def _pieces(
        self, walk: ExportWalk, device: torch.device, finite: DeviceFiniteCheck
    ) -> Iterator[tuple[ExportedTensor, torch.Tensor]]:
        for piece in walk:
            content = bytes_of(piece, device)
            if self._check and content.numel():
                finite.check(piece.spec.name, content, piece.dtype)
            yield piece, content

    def _room_for(self, plan: BucketPlan, device: torch.device) -> Room:
        size = min(plan.bucket, plan.total)
        room = self._room
        if room is None or room[0].numel() < size or room[0].device != device:
            self._room = None
            room = self._room = (_empty(size, device), _empty(size, device))
        return room


def fill(
    plan: BucketPlan, pieces: Iterable[tuple[ExportedTensor, torch.Tensor]], room: Room
) -> Iterator[torch.Tensor]:
    """Yield the buckets of a plan, by turns in one of two buffers.

    Raises:
        CorruptDataError: The tensors are not those of the plan.
    """
    number = 0
    for place, (piece, rest) in zip(plan.slots, _as_planned(plan, pieces), strict=True):
        at, content = place.start, rest
        while content.numel():
            if at // plan.bucket != number:
                yield room[number % 2][: plan.bucket]
                number = at // plan.bucket
            offset = at - number * plan.bucket
            length = min(plan.bucket - offset, content.numel())
            room[number % 2][offset : offset + length].copy_(content[:length])
            content, at = content[length:], at + length
        del piece
    yield room[number % 2][: plan.total - number * plan.bucket]


def bytes_of(piece: ExportedTensor, device: torch.device = CPU) -> torch.Tensor:
    """Return the bytes of a tensor on a device, cast; without a copy where it is that already."""
    whole = piece.tensor.to(device, piece.dtype).contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _as_planned(plan: BucketPlan, pieces: Iterable[Any]) -> Iterator[Any]:
    count = 0
    for count, (piece, content) in enumerate(pieces, 1):
        place = plan.slots[count - 1] if count <= len(plan.slots) else None
        if place is None or (place.name, place.dtype, place.shape) != piece.spec[:3]:
            raise CorruptDataError(f"the export has changed at tensor {piece.spec.name!r}")
        yield piece, content
    if count != len(plan.slots):
        raise CorruptDataError(f"the export has {count} tensors where it had {len(plan.slots)}")


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
