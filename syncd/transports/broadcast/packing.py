"""What a broadcast carries: buckets, packed in memory that is allocated once, and their checksum.

The checksum is computed where the bytes are. In main memory it is xxh3. On a device it is a weighted sum of words,
computed by the device itself: copying all bytes to main memory for xxh3 would take as long as the link to the host,
several times what NCCL takes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch

from syncd.client.wait import Deadline
from syncd.errors import CorruptDataError
from syncd.protocol.buckets import BucketPlan
from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.safetensors import Tensor
from syncd.transports.broadcast.group_calls import always
from syncd.transports.broadcast.process_group import UNDER_WAY, ProcessGroup
from syncd.transports.filesystem.export_walk import ExportedTensor, ExportWalk
from syncd.transports.torch_tensors import DeviceFiniteCheck

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
        finite, room, number = DeviceFiniteCheck(), self._room_for(plan, device), 0
        for slot, exported in _as_planned(plan, walk):
            at, content = slot.start, bytes_of(exported, device)
            if self._check and content.numel():
                finite.check(slot.name, content, exported.dtype)
            while content.numel():
                if at // plan.bucket != number:
                    yield room[number % 2][: plan.bucket]
                    number = at // plan.bucket
                offset = at - number * plan.bucket
                length = min(plan.bucket - offset, content.numel())
                room[number % 2][offset : offset + length].copy_(content[:length])
                content, at = content[length:], at + length
        yield room[number % 2][: plan.total - number * plan.bucket]
        finite.require()

    def drop(self) -> None:
        """Drop the memory: a broadcast that failed may still read it."""
        self._room = None

    def _room_for(self, plan: BucketPlan, device: torch.device) -> Room:
        size = min(plan.bucket, plan.total)
        room = self._room
        if room is None or room[0].numel() < size or room[0].device != device:
            self._room = None
            room = self._room = (_empty(size, device), _empty(size, device))
        return room


def carry(
    group: ProcessGroup,
    buckets: Iterable[torch.Tensor],
    deadline: Deadline,
    takes_part: Callable[[], bool] = always,
) -> str:
    """Send or receive buckets, `UNDER_WAY` at once, and return their checksum.

    Args:
        group: The group.
        buckets: Where they are; each stays valid until the next but one is requested.
        deadline: When to give up.
        takes_part: Asked now and then: whether the other side still takes part.

    Raises:
        GroupError: The group is broken.
        TimedOutError: The deadline has passed.
    """
    checksum, under_way = make_checksum(group.device), deque[tuple[torch.Tensor, Any]]()

    def finish_first() -> None:
        bucket, work = under_way.popleft()
        group.finish(work, deadline, takes_part)
        checksum.add(bucket)

    with group.aborted_at(deadline):
        for bucket in buckets:
            under_way.append((bucket, group.broadcast(bucket, deadline)))
            if len(under_way) == UNDER_WAY:
                finish_first()
        while under_way:
            finish_first()
        return checksum.text()


def bytes_of(exported: ExportedTensor, device: torch.device) -> torch.Tensor:
    """Return the bytes of a tensor on a device, cast; without a copy where it is that already."""
    whole = exported.tensor.to(device, exported.dtype).contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _as_planned(plan: BucketPlan, walk: ExportWalk) -> Iterator[tuple[Tensor, ExportedTensor]]:
    for slot, exported in zip_longest(plan.slots, walk):
        if slot is None or exported is None or (slot.name, slot.dtype, slot.shape) != exported.spec[:3]:
            name = slot.name if exported is None else exported.spec.name
            raise CorruptDataError(f"the export has changed at tensor {name!r}")
        yield slot, exported


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


_WORD = 8
_CHUNK = 1 << 20
"""Words that are weighted at once: their product needs 8 MiB beside them."""

_STEP = 0x5851F42D4C957F2D
_SPREAD, _MIX = 0x61C8864680B583EB, 0x369DEA0F31A53F85
_MASK = (1 << 64) - 1


def make_checksum(device: torch.device) -> "ByteChecksum | WordChecksum":
    """Return a new checksum of buckets that are on a device; `torch.device("cpu")` is main memory."""
    return ByteChecksum() if device.type == "cpu" else WordChecksum(device)


class ByteChecksum:
    """xxh3_128 over all bytes."""

    def __init__(self) -> None:
        self._state = hasher()

    def add(self, bucket: torch.Tensor) -> None:
        """Add a bucket."""
        self._state.update(memoryview(bucket.numpy()))  # type: ignore[arg-type] # numpy's arrays are buffers

    def text(self) -> str:
        """Return the checksum."""
        return f"{DEFAULT}:{self._state.hexdigest()}"


class WordChecksum:
    """The sum of all words of 8 bytes, each times an odd weight of its position, modulo 2^64.

    An odd weight has an inverse, so every change of one word is detected; any other damage is missed with a
    probability of about 2^-64. Integers wrap alike on every device, and their sum does not depend on its order. The
    checksum detects damage, not an attack.

    Args:
        device: Where the buckets are.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        positions = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _SPREAD
        self._weights = ((positions ^ (positions >> 32)) * _MIX) | 1

    def add(self, bucket: torch.Tensor) -> None:
        """Queue a bucket on the device."""
        for words in torch.split(_words(bucket), _CHUNK):
            self._sum.mul_(_STEP).add_((words * self._weights[: words.numel()]).sum())

    def text(self) -> str:
        """Wait for the device and return the checksum."""
        return f"words64:{int(self._sum.item()) & _MASK:016x}"


def _words(bucket: torch.Tensor) -> torch.Tensor:
    size = bucket.numel()
    if size % _WORD or bucket.storage_offset() % _WORD:
        padded = torch.zeros(-(-size // _WORD) * _WORD, dtype=torch.uint8, device=bucket.device)
        padded[:size].copy_(bucket)
        bucket = padded
    return bucket.view(torch.int64)
