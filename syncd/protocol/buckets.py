"""The layout of a broadcast: the tensors one after the other, cut into buckets. Pure.

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

ALIGNMENT = 16
"""Each tensor starts at a multiple of this, so that it can be viewed in its dtype."""

_LARGEST = 1 << 50


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The layout of one broadcast.

    Args:
        slots: The tensors with their places among all bytes, in the order of sending.
        total: Bytes of all tensors, gaps included.
        bucket: Bytes of each bucket, except the last.
        digest: Of names, dtypes, shapes and bucket size.
    """

    slots: tuple[Tensor, ...]
    total: int
    bucket: int
    digest: str

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each bucket."""
        for start in range(0, self.total, self.bucket):
            yield start, min(start + self.bucket, self.total)


def plan_buckets(tensors: Sequence[TensorInfo], bucket: int) -> BucketPlan:
    """Return the layout of a broadcast of tensors.

    Raises:
        CorruptDataError: There is nothing to send, or a tensor cannot be sent.
    """
    slots, end, seen = [], 0, set()
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
    return digest_bytes(encode({"tensors": listed, "bucket": bucket}))
