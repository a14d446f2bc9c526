"""The checksum of what a broadcast carries, computed where the bytes are.

In main memory it is xxh3. On a device it is a weighted sum of words, computed by the device itself: copying all bytes
to main memory for xxh3 would take as long as the link to the host, several times what NCCL takes.
"""

from typing import Protocol

import torch

from syncd.protocol.digest import DEFAULT, hasher

_WORD = 8
_CHUNK = 1 << 20
"""Words that are weighted at once: their product needs 8 MiB beside them."""

_STEP = 0x5851F42D4C957F2D
_SPREAD, _MIX = 0x61C8864680B583EB, 0x369DEA0F31A53F85
_MASK = (1 << 64) - 1


class Checksum(Protocol):
    """A checksum of buckets, in their order."""

    def add(self, bucket: torch.Tensor) -> None:
        """Add a bucket of bytes, which may change once this thread's stream has passed this call."""

    def text(self) -> str:
        """Return the checksum as `name:hex`."""


def make_checksum(device: torch.device) -> Checksum:
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
