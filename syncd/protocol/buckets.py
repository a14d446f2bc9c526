"""Where each byte of a broadcast lies: the tensors one behind the other, cut into buckets. Pure.

Sender and receivers make the same plan of the same metadata; a digest of it says whether they do.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import encode
from syncd.protocol.rendezvous import TensorMeta
from syncd.protocol.safetensors import DTYPE_BITS

ALIGNMENT = 16
"""Tensors begin at a multiple of this, so that each can be viewed in its own dtype."""

_LARGEST = 1 << 50


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies.

    Args:
        name: Its name.
        dtype: As safetensors calls it.
        shape: Its shape.
        start: Its first byte.
        end: The byte after its last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one broadcast.

    Args:
        places: The tensors, in the order of sending.
        total: Bytes of all of it.
        bucket: Bytes of each bucket but the last one.
        digest: Of names, dtypes, shapes and bucket size.
    """

    places: tuple[Place, ...]
    total: int
    bucket: int
    digest: str

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield where each bucket begins and ends."""
        for start in range(0, self.total, self.bucket):
            yield start, min(start + self.bucket, self.total)


def make_plan(tensors: Sequence[TensorMeta], bucket: int) -> Plan:
    """Return the layout of tensors.

    Raises:
        CorruptDataError: There is nothing to send, or a tensor is not one.
    """
    places, end, seen = [], 0, set()
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BITS or DTYPE_BITS[dtype] % 8 or name in seen:
            raise CorruptDataError(f"no tensor that can be broadcast: {name!r}, {dtype}")
        seen.add(name)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * DTYPE_BITS[dtype] // 8
        places.append(Place(name, dtype, shape, start, end))
    if not 0 < end <= _LARGEST or bucket < 1:
        raise CorruptDataError(f"nothing that can be broadcast: {end} bytes in buckets of {bucket}")
    return Plan(tuple(places), end, bucket, _digest(tensors, bucket))


def _digest(tensors: Sequence[TensorMeta], bucket: int) -> str:
    listed = [[name, dtype, list(shape)] for name, dtype, shape in tensors]
    return digest_bytes(encode({"tensors": listed, "bucket": bucket}))
