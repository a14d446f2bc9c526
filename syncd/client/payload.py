"""Tensors in and out of one safetensors shard, piece by piece, without torch or numpy being imported here.

An array or tensor that a caller hands in brings its own library with it; only its own methods are used.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.digest import chunks, hasher, name_of
from syncd.protocol.disk import Disk
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import (
    DTYPE_BITS,
    METADATA,
    Header,
    encode_header,
    parse_header,
    read_header,
    signature,
)

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_TRIPLE = 3


class Tensor(NamedTuple):
    """One tensor.

    Args:
        dtype: Its dtype as safetensors names it: F32, BF16, ...
        shape: Its shape.
        data: Its elements, little-endian, in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


TensorMeta = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape)."""


class _Source(NamedTuple):
    """A tensor that has not been turned into bytes yet: only one at a time is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def encode_state(state: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file of numpy arrays, torch tensors or (dtype, shape, bytes).

    Raises:
        UsageError: A value is none of these, or of a dtype that the format does not have.
    """
    sources = [_source(name, value) for name, value in state.items()]
    # Wide elements first, as the library does: every tensor is then aligned to its own element.
    sources.sort(key=lambda source: (-DTYPE_BITS[source.dtype], source.name))
    yield encode_header((*source[:3], source.size) for source in sources)
    for source in sources:
        data = _data(source)
        if len(data) != source.size:
            raise UsageError(f"tensor {source.name!r} has {len(data)} bytes, its shape takes {source.size}")
        yield data


def read_state(disk: Disk, step_path: str, manifest: Manifest) -> dict[str, Tensor]:
    """Return the tensors of a step, every byte of them checked against the manifest.

    Raises:
        CorruptDataError: A shard is not what the manifest says.
        OSError: It cannot be read; a missing one stays `FileNotFoundError`.
    """
    tensors: dict[str, Tensor] = {}
    headers = []
    for record in manifest.shards:
        path = f"{step_path}/{record.name}"
        data = _verified(disk, path, record)
        header = parse_header(bytes(data[: 8 + int.from_bytes(data[:8], "little")]), len(data), path)
        headers.append(header)
        tensors |= {name: _slice(header, name, data) for name in header.tensors}
    signature(headers)
    return tensors


def iterate_state(disk: Disk, step_path: str, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a step one by one; all of it has been checked before the first one comes."""
    for record in manifest.shards:
        for _ in _pieces(disk, f"{step_path}/{record.name}", record):
            pass
    for record, header in zip(manifest.shards, read_headers(disk, step_path, manifest), strict=True):
        for name, tensor in header.tensors.items():
            place, length = header.data_offset + tensor.start, tensor.end - tensor.start
            data = disk.read_at(f"{step_path}/{record.name}", place, length)
            yield name, Tensor(tensor.dtype, tensor.shape, data)


def read_headers(disk: Disk, step_path: str, manifest: Manifest) -> list[Header]:
    """Return the headers of a step's shards, each tensor in one of them only."""
    headers = [read_header(disk, f"{step_path}/{record.name}") for record in manifest.shards]
    signature(headers)
    return headers


def meta_of(headers: Sequence[Header]) -> list[TensorMeta]:
    """Return name, dtype and shape of each tensor, in the order in which they lie on disk."""
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def _slice(header: Header, name: str, data: memoryview) -> Tensor:
    tensor, begin = header.tensors[name], header.data_offset
    return Tensor(tensor.dtype, tensor.shape, data[begin + tensor.start : begin + tensor.end])


def _verified(disk: Disk, path: str, record: FileRecord) -> memoryview:
    data, place = bytearray(record.size), 0
    for piece in _pieces(disk, path, record):
        data[place : place + len(piece)] = piece
        place += len(piece)
    return memoryview(data).toreadonly()


def _pieces(disk: Disk, path: str, record: FileRecord) -> Iterator[bytes]:
    """Yield a file in pieces; fails at its end unless all of it was what the record says."""
    name = name_of(record.digest, path)
    state, left = hasher(name), record.size
    for piece in chunks(disk, path):
        left -= len(piece)
        if left < 0:
            break
        state.update(piece)
        yield piece
    if left != 0 or f"{name}:{state.hexdigest()}" != record.digest:
        raise CorruptDataError("content does not match its digest", path=path)


def _source(name: str, value: Any) -> _Source:
    if not isinstance(name, str) or name == METADATA:
        raise UsageError(f"not a name of a tensor: {name!r}")
    if isinstance(value, tuple) and len(value) == _TRIPLE:
        dtype, shape = value[0], value[1]
    else:
        dtype, shape = getattr(value, "dtype", ""), getattr(value, "shape", ())
        dtype = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    dtype = _DTYPES.get(str(dtype), dtype)
    if dtype not in DTYPE_BITS:
        kind = type(value).__name__
        raise UsageError(f"tensor {name!r} is a {kind} of a dtype that safetensors does not have")
    return _Source(name, dtype, tuple(int(length) for length in shape), value)


def _data(source: _Source) -> bytes | memoryview:
    value = source.value
    if isinstance(value, tuple):
        return memoryview(value[2]).cast("B")
    if _is_torch(value):
        flat = value.detach().contiguous().cpu().reshape(-1)
        return memoryview(flat.view(sys.modules["torch"].uint8).numpy())
    if value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("<"))
    if not value.flags.c_contiguous:
        value = value.copy(order="C")
    return memoryview(value.reshape(-1).view("uint8"))


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
