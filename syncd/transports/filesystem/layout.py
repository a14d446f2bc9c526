"""Where each byte of a shard goes, decided before the first one is written.

The header of a safetensors file is padded with spaces so that the data begins at a multiple of `ALIGN`: what
lies aligned in memory is aligned in the file then, and can be written without passing through the page cache.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from syncd.protocol.safetensors import DTYPE_BITS

ALIGN = 4096
"""What O_DIRECT asks of memory, offsets and lengths on every file system known."""

WORD = 8
"""The widest element. Tensors whose length is a multiple of it leave whatever follows them aligned."""

_PREFIX = 8
METADATA = "__metadata__"


class Spec(NamedTuple):
    """What one tensor is in the file: `dtype` as safetensors calls it, `size` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


class Span(NamedTuple):
    """Where one tensor is; `start` and `end` count from the beginning of the data."""

    spec: Spec
    start: int
    end: int


class Layout:
    """The fixed layout of one shard.

    Args:
        specs: Its tensors in the order in which they were met.
    """

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.specs = in_file_order(specs)
        self.data_size = sum(spec.size for spec in self.specs)
        self.header = encode_header(self.specs)

    @property
    def data_offset(self) -> int:
        """Return where the data begins, a multiple of `ALIGN`."""
        return len(self.header)

    @property
    def size(self) -> int:
        """Return the length of the file."""
        return len(self.header) + self.data_size

    def spans(self) -> Iterator[Span]:
        """Yield the place of each tensor, in file order."""
        start = 0
        for spec in self.specs:
            yield Span(spec, start, start + spec.size)
            start += spec.size


def is_odd(spec: Spec) -> bool:
    """Say whether a tensor would leave what follows it misaligned: such tensors go last."""
    return spec.size % WORD != 0


def in_file_order(specs: Iterable[Spec]) -> list[Spec]:
    """Return the tensors as the file has them: as met, but the odd ones last, those of wide elements first.

    The format has no room for padding between tensors, and readers refuse an element that is not aligned.
    """
    found = list(specs)
    odd = sorted(filter(is_odd, found), key=lambda spec: -DTYPE_BITS[spec.dtype])
    return [spec for spec in found if not is_odd(spec)] + odd


def encode_header(specs: Iterable[Spec]) -> bytes:
    """Return the beginning of a file: the length, the JSON, and spaces up to a multiple of `ALIGN`."""
    document: dict[str, object] = {METADATA: {"format": "pt"}}
    start = 0
    for spec in specs:
        offsets = [start, start + spec.size]
        document[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        start += spec.size
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX + len(text)) % ALIGN)
    return len(text).to_bytes(_PREFIX, "little") + text


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return `model.safetensors.index.json`: which shard holds each tensor."""
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def aligned(size: int) -> int:
    """Return the next multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN
