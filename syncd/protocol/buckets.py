"""The layout of a broadcast: the tensors one after the other, cut into buckets. Pure.

A large tensor is sent from where it is, in buckets of its own; small ones that follow each other share a bucket.
Sender and receivers compute the same plan from the same metadata; they compare its digest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import encode
from syncd.protocol.rendezvous import TensorInfo
from syncd.protocol.safetensors import DTYPE_BITS, Tensor

ALIGNMENT = 16  # each tensor starts at a multiple of this, so that it can be viewed in its dtype

LARGE = 1 << 20
"""Bytes from which a tensor has buckets of its own: packing it would cost a copy, a bucket more costs far less."""

_LARGEST = 1 << 50
_LAYOUT = "large tensors apart"  # part of the digest: a release that cuts otherwise refuses the round


@dataclass(frozen=True, slots=True)
class BucketPlan:
    slots: tuple[Tensor, ...]  # the tensors with their places among all bytes, in the order of sending
    total: int  # bytes of all tensors, gaps included
    bucket: int  # the most bytes of a bucket, a multiple of `ALIGNMENT`
    digest: str  # of names, dtypes, shapes, bucket size and the way of cutting

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each bucket. The gaps between tensors are sent only inside a shared bucket."""
        for run in self.runs():
            for start in range(run[0].start, run[-1].end, self.bucket):
                yield start, min(start + self.bucket, run[-1].end)

    def runs(self) -> Iterator[list[Tensor]]:
        """Yield what is cut into buckets together: a large tensor, or small ones in a row, `bucket` bytes at most."""
        run: list[Tensor] = []
        for slot in self.slots:
            if slot.end == slot.start:
                continue
            if run and (self.is_large(slot) or slot.end - run[0].start > self.bucket):
                yield run
                run = []
            run.append(slot)
            if self.is_large(slot):
                yield run
                run = []
        if run:
            yield run

    def is_large(self, slot: Tensor) -> bool:
        return slot.end - slot.start >= min(LARGE, self.bucket)


def plan_buckets(tensors: Sequence[TensorInfo], bucket: int) -> BucketPlan:
    """Return the layout of a broadcast of tensors, which are sent in this order.

    `bucket`, the most bytes of a bucket, is rounded up to whole elements of every dtype.
    """
    slots, end, seen = [], 0, set()
    bucket = -(-bucket // ALIGNMENT) * ALIGNMENT  # whole elements of every dtype
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BITS or DTYPE_BITS[dtype] % 8 or name in seen:
            raise CorruptDataError(f"tensor {name!r} of dtype {dtype} cannot be broadcast")
        seen.add(name)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * DTYPE_BITS[dtype] // 8
        slots.append(Tensor(name, dtype, shape, start, end))
    if not 0 < end <= _LARGEST or bucket < 1:
        raise CorruptDataError(f"{end} bytes in buckets of {bucket} cannot be broadcast")
    return BucketPlan(tuple(slots), end, bucket, _digest(tensors, bucket))


def _digest(tensors: Sequence[TensorInfo], bucket: int) -> str:
    listed = [[name, dtype, list(shape)] for name, dtype, shape in tensors]
    return digest_bytes(encode({"tensors": listed, "bucket": bucket, "layout": _LAYOUT}))
