"""What a broadcast carries: buckets and their checksum.

A bucket of a large tensor is the tensor's own memory. Small tensors are packed, in memory that is allocated once.

The checksum is computed where the bytes are. In main memory it is xxh3. On a device it is a weighted sum of words,
computed by the device itself: copying all bytes to main memory for xxh3 would take as long as the link to the host,
several times what NCCL takes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch

from syncd.client.wait import Deadline
from syncd.errors import CorruptDataError
from syncd.parts.broadcast.process_group import UNDER_WAY, ProcessGroup
from syncd.protocol.buckets import BucketPlan
from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.safetensors import Tensor
from syncd.transports.files.export_walk import ExportedTensor, ExportWalk
from syncd.transports.torch_tensors import DeviceFiniteCheck

Planned = Iterator[tuple[Tensor, ExportedTensor]]
"""Tensors of a walk with their places in the plan; those without elements are left out."""


class Packer:
    """Makes the buckets of a plan from the tensors of a walk."""

    def __init__(self, *, check_finite: bool) -> None:
        self._check = check_finite
        self._buffers: deque[torch.Tensor | None] = deque(
            [None, None]
        )  # one is filled while the other is sent

    def buckets(self, plan: BucketPlan, walk: ExportWalk, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield the buckets of a walk, on a device; each is valid until the next but one is requested."""
        finite = DeviceFiniteCheck()
        planned = ((slot, tensor) for slot, tensor in _as_planned(plan, walk) if slot.end > slot.start)
        for run in plan.runs():
            if plan.is_large(run[0]):
                yield from self._pieces(plan, next(planned)[1], device, finite)
            else:
                yield self._packed(run, planned, device, finite)
        for slot, _ in planned:
            raise AssertionError(slot)  # every tensor with elements is in a run
        finite.require()

    def drop(self) -> None:
        """Drop the memory: a broadcast that failed may still read it."""
        self._buffers = deque([None, None])

    def _pieces(
        self, plan: BucketPlan, exported: ExportedTensor, device: torch.device, finite: DeviceFiniteCheck
    ) -> Iterator[torch.Tensor]:
        """Yield the pieces of a large tensor, copied only if its memory may be used for the next tensor."""
        content = bytes_of(exported, device)
        is_own = exported.lasts or content.data_ptr() != exported.tensor.data_ptr()
        for piece in torch.split(content, plan.bucket):
            if self._check:
                finite.check(exported.spec.name, piece, exported.dtype)
            yield piece if is_own else self._buffer(piece.numel(), device).copy_(piece)

    def _packed(
        self, run: Sequence[Tensor], planned: Planned, device: torch.device, finite: DeviceFiniteCheck
    ) -> torch.Tensor:
        start = run[0].start
        bucket = self._buffer(run[-1].end - start, device)
        for slot, exported in islice(planned, len(run)):
            content = bytes_of(exported, device)
            if self._check:
                finite.check(slot.name, content, exported.dtype)
            bucket[slot.start - start : slot.end - start].copy_(content)
        return bucket

    def _buffer(self, size: int, device: torch.device) -> torch.Tensor:
        """Return memory for a bucket: that of the last but one, or new memory if it is too small."""
        self._buffers.rotate()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[0] = torch.zeros(size, dtype=torch.uint8, device=device)
        return buffer[:size]


def send_buckets(process_group: ProcessGroup, buckets: Iterable[torch.Tensor], deadline: Deadline) -> str:
    """Send buckets, each valid until the next but one is requested, `UNDER_WAY` at once; return their checksum."""
    checksum, under_way = make_checksum(process_group.device), deque[Any]()
    with process_group.aborted_at(deadline):
        for bucket in buckets:
            under_way.append(process_group.broadcast(bucket, deadline))
            checksum.add(bucket)
            if len(under_way) == UNDER_WAY:
                process_group.finish(under_way.popleft(), deadline)
        while under_way:
            process_group.finish(under_way.popleft(), deadline)
        return checksum.text()


def receive_buckets(
    process_group: ProcessGroup,
    buckets: Iterable[torch.Tensor],
    deadline: Deadline,
    takes_part: Callable[[], bool],
) -> str:
    """Receive into buckets, `UNDER_WAY` at once, while the trainer `takes_part`; return the checksum of what came."""
    checksum, under_way = make_checksum(process_group.device), deque[tuple[torch.Tensor, Any]]()

    def finish_first() -> torch.Tensor:
        bucket, work = under_way.popleft()
        process_group.finish(work, deadline, takes_part)
        return bucket

    with process_group.aborted_at(deadline):
        for bucket in buckets:
            received = finish_first() if len(under_way) == UNDER_WAY else None
            under_way.append((bucket, process_group.broadcast(bucket, deadline)))
            if received is not None:
                checksum.add(received)  # while the next ones are under way
        while under_way:
            checksum.add(finish_first())
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


_WORD = 8
_CHUNK = 1 << 20  # words that are weighted at once: their product needs 8 MiB beside them

_STEP = 0x5851F42D4C957F2D
_SPREAD, _MIX = 0x61C8864680B583EB, 0x369DEA0F31A53F85
_MASK = (1 << 64) - 1


def make_checksum(device: torch.device) -> "ByteChecksum | WordChecksum":
    return ByteChecksum() if device.type == "cpu" else WordChecksum(device)


class ByteChecksum:
    def __init__(self) -> None:
        self._state = hasher()

    def add(self, bucket: torch.Tensor) -> None:
        self._state.update(memoryview(bucket.numpy()))  # type: ignore[arg-type] # numpy's arrays are buffers

    def text(self) -> str:
        return f"{DEFAULT}:{self._state.hexdigest()}"


class WordChecksum:
    """The sum of all words of 8 bytes, each times an odd weight of its position, modulo 2^64.

    An odd weight has an inverse, so every change of one word is detected; any other damage is missed with a
    probability of about 2^-64. Integers wrap alike on every device, and their sum does not depend on its order. The
    checksum detects damage, not an attack.
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
