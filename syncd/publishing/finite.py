"""Finds NaN and infinity in the bytes of a shard while they are copied, with nothing but the standard library.

Numbers are stored with their exponent in the last byte, so one strided slice has what tells. In weights hardly any
element has an exponent near its largest, and a search for those bytes is fast (3 to 13 GB/s on one core;
docs/commands.md). Only a piece in which one is found is examined closely.
"""

from dataclasses import dataclass

from syncd.errors import TROUBLESHOOTING, NonFiniteError
from syncd.protocol.safetensors import Header, Tensor


@dataclass(frozen=True, slots=True)
class _Format:
    """Which bytes of a number say that it is not finite."""

    size: int  # bytes of one number
    last: bytes  # values of its last byte
    before: bytes = b""  # values that the byte before must have as well; empty where the last one tells alone
    parts: int = 1  # numbers of one element

    def first(self, data: bytes) -> int | None:
        """Return the place of the first number that is not finite, None where all are."""
        last_bytes = data[self.size - 1 :: self.size]
        if all(last_bytes.find(value) < 0 for value in self.last):
            return None
        marks = last_bytes.translate(_marking(self.last))
        if self.before:
            marks = _both(marks, data[self.size - 2 :: self.size].translate(_marking(self.before)))
        position = marks.find(1)
        return None if position < 0 else position


_SINGLE = _Format(4, b"\x7f\xff", bytes(range(0x80, 0x100)))
_FIVE_BITS = b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"

_FORMATS = {
    "F64": _Format(8, b"\x7f\xff", bytes(range(0xF0, 0x100))),
    "F32": _SINGLE,
    "C64": _Format(_SINGLE.size, _SINGLE.last, _SINGLE.before, parts=2),
    "BF16": _Format(2, b"\x7f\xff", bytes(range(0x80, 0x100))),
    "F16": _Format(2, _FIVE_BITS),
    "F8_E5M2": _Format(1, _FIVE_BITS),
    "F8_E4M3": _Format(1, b"\x7f\xff"),
    "F8_E4M3FNUZ": _Format(1, b"\x80"),
    "F8_E5M2FNUZ": _Format(1, b"\x80"),
    "F8_E8M0": _Format(1, b"\xff"),
}
"""Formats that can hold what is not finite; integers cannot, nor can the floats of 4 and 6 bits."""


class FiniteCheck:
    """Checks a shard in pieces, in order."""

    def __init__(self, header: Header, path: str) -> None:
        self._path, self._at = path, -header.data_offset
        self._tensors = iter(header.tensors.values())
        self._tensor = next(self._tensors, None)
        self._seen, self._rest = 0, b""

    def feed(self, piece: bytes) -> None:
        begin, end = self._at, self._at + len(piece)
        while self._tensor is not None and self._tensor.start < end:
            tensor = self._tensor
            self._check(tensor, piece[max(tensor.start - begin, 0) : tensor.end - begin])
            if tensor.end > end:
                break
            self._tensor, self._seen, self._rest = next(self._tensors, None), 0, b""
        self._at = end

    def _check(self, tensor: Tensor, part: bytes) -> None:
        """Check more bytes of a tensor; an incomplete number at their end is kept for the next call."""
        form = _FORMATS.get(tensor.dtype)
        if form is None:
            return
        data = self._rest + part
        whole = len(data) - len(data) % form.size
        position = form.first(data[:whole])
        if position is not None:
            index = (self._seen + position) // form.parts
            raise NonFiniteError(
                f"tensor {tensor.name!a} holds NaN or infinity, first at flat index {index}",
                path=self._path,
                hint="publish other weights, or pass --allow-nonfinite: "
                f"{TROUBLESHOOTING}#weights-that-are-not-finite",
            )
        self._seen, self._rest = self._seen + whole // form.size, data[whole:]


def _marking(values: bytes) -> bytes:
    """Return the table for `bytes.translate` that makes these values 1 and all others 0."""
    return bytes(value in values for value in range(256))


def _both(first: bytes, other: bytes) -> bytes:
    both = int.from_bytes(first, "little") & int.from_bytes(other, "little")
    return both.to_bytes(len(first), "little")
