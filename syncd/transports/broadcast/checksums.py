"""The checksum of what a broadcast carries, taken where the bytes are; torch is handed in.

In main memory it is xxh3. On a device it is a weighted sum of words, taken by the device itself: bringing all bytes
to main memory for xxh3 would take as long as the link to the host, several times what NCCL takes.
"""

from typing import Any, Protocol

from syncd.protocol.digest import DEFAULT, hasher

_WORD = 8
_CHUNK = 1 << 20
"""Words that are weighted at once: their product needs 8 MiB beside them."""

_STEP = 0x5851F42D4C957F2D
_SPREAD, _MIX = 0x61C8864680B583EB, 0x369DEA0F31A53F85
_MASK = (1 << 64) - 1


class Checksum(Protocol):
    """A checksum of buckets, in their order."""

    def add(self, bucket: Any) -> None:
        """Take a bucket: a tensor of bytes, which may change once this thread's stream has come here."""

    def text(self) -> str:
        """Return the checksum as `name:hex`."""


def make_checksum(torch: Any, device: Any) -> Checksum:
    """Return a new checksum of buckets that are on a device; `torch.device("cpu")` is main memory."""
    return Bytes() if device.type == "cpu" else Words(torch, device)


class Bytes:
    """xxh3_128 over all bytes."""

    def __init__(self) -> None:
        self._state = hasher()

    def add(self, bucket: Any) -> None:
        """Take a bucket."""
        self._state.update(memoryview(bucket.numpy()))

    def text(self) -> str:
        """Return the checksum."""
        return f"{DEFAULT}:{self._state.hexdigest()}"


class Words:
    """The sum of all words of 8 bytes, each times an odd weight of its place, modulo 2^64.

    An odd weight has an inverse, so no change of one word is missed; any other damage is with 2^-64, about. Whole
    numbers wrap alike on every device, and their sum does not depend on its order. It guards against damage, not
    against an enemy.

    Args:
        torch: The module.
        device: Where buckets are.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        places = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _SPREAD
        self._weights = ((places ^ (places >> 32)) * _MIX) | 1

    def add(self, bucket: Any) -> None:
        """Take a bucket; the device has not done so yet when this returns."""
        for words in self._words(bucket).split(_CHUNK):
            self._sum.mul_(_STEP).add_((words * self._weights[: words.numel()]).sum())

    def text(self) -> str:
        """Return the checksum, once the device has come to it."""
        return f"words64:{int(self._sum.item()) & _MASK:016x}"

    def _words(self, bucket: Any) -> Any:
        size = bucket.numel()
        if size % _WORD or bucket.storage_offset() % _WORD:
            padded = self._torch.zeros(
                -(-size // _WORD) * _WORD, dtype=self._torch.uint8, device=bucket.device
            )
            padded[:size].copy_(bucket)
            bucket = padded
        return bucket.view(self._torch.int64)
