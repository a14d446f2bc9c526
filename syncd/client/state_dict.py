"""State dicts in and out of safetensors shards, piece by piece; imports neither torch nor numpy.

An array or tensor that a caller passes brings its library with it; only its own methods are called.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError, TryAgainError, UsageError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.digest import chunks
from syncd.protocol.disk import Disk, FileStat
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord, record_chunks
from syncd.protocol.rendezvous import TensorInfo
from syncd.protocol.safetensors import (
    DTYPE_BITS,
    METADATA,
    Header,
    encode_header,
    parse_header,
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
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?:adapter_)?model(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors", re.ASCII)
"""How other frameworks call their files of weights."""


class TensorData(NamedTuple):
    dtype: str  # its dtype as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    data: bytes | memoryview  # its elements, little-endian, in C order


class _Unencoded(NamedTuple):
    """A tensor that is not turned into bytes yet; only one at a time is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def encode_state(state: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file of numpy arrays, torch tensors or (dtype, shape, bytes)."""
    unencoded = [_unencoded(name, value) for name, value in state.items()]
    # Wide elements first, as the library does: every tensor is then aligned to its own element.
    unencoded.sort(key=lambda source: (-DTYPE_BITS[source.dtype], source.name))
    yield encode_header((*source[:3], source.size) for source in unencoded)
    for source in unencoded:
        data = _data(source)
        if len(data) != source.size:
            raise UsageError(f"tensor {source.name!r} has {len(data)} bytes, its shape takes {source.size}")
        yield data


def read_state(disk: Disk, step_path: str, manifest: Manifest) -> dict[str, TensorData]:
    """Return the tensors of a step, every byte of them checked against the manifest."""
    return _tensors(
        (f"{step_path}/{record.name}", _checked(disk, step_path, record)) for record in manifest.shards
    )


def _checked(disk: Disk, step_path: str, record: FileRecord) -> bytearray:
    whole, end = bytearray(record.size), 0
    for piece in record_chunks(disk, f"{step_path}/{record.name}", record):
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return whole


def _tensors(files: Iterable[tuple[str, bytes | bytearray]]) -> dict[str, TensorData]:
    """Return the tensors of files, of which path and content are given; each tensor is in one of them only."""
    tensors, headers = dict[str, TensorData](), []
    for path, content in files:
        data = memoryview(content).toreadonly()
        header = parse_header(bytes(data[: 8 + int.from_bytes(data[:8], "little")]), len(data), path)
        headers.append(header)
        for name, tensor in header.tensors.items():
            begin, end = header.data_offset + tensor.start, header.data_offset + tensor.end
            tensors[name] = TensorData(tensor.dtype, tensor.shape, data[begin:end])
    signature(headers)
    return tensors


def iterate_state(disk: Disk, step_path: str, manifest: Manifest) -> Iterator[tuple[str, TensorData]]:
    """Yield the tensors of a step one by one, after every byte was checked against the manifest."""
    for record in manifest.shards:
        for _ in record_chunks(disk, f"{step_path}/{record.name}", record):
            pass
    for record, header in zip(manifest.shards, read_headers(disk, step_path, manifest), strict=True):
        for name, tensor in header.tensors.items():
            offset, length = header.data_offset + tensor.start, tensor.end - tensor.start
            data = disk.read_at(f"{step_path}/{record.name}", offset, length)
            yield name, TensorData(tensor.dtype, tensor.shape, data)


def foreign_shards(disk: Disk, directory: str) -> list[str]:
    """Return the paths of the safetensors files in a directory that another framework wrote; none where it has none.

    The index decides where there is one, as for loaders. A link is no file.
    """
    names = {entry.name for entry in disk.list(directory) if entry.kind == "file"}
    if _INDEX in names:
        names = _indexed(disk, f"{directory}/{_INDEX}")
    return [f"{directory}/{name}" for name in sorted(names) if _SHARD.fullmatch(name)]


def _indexed(disk: Disk, path: str) -> set[str]:
    try:
        names = set(json.loads(disk.read(path))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError("not an index of weights", path=path) from error
    if odd := [name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)]:
        raise CorruptDataError(f"the index names {odd[0]!r}, which is no shard in this directory", path=path)
    return names


def read_foreign_state(disk: Disk, paths: Sequence[str]) -> dict[str, TensorData]:
    """Return the tensors of files that have no manifest; headers and lengths are checked, there are no digests."""
    return _tensors((path, _settled(disk, path)) for path in paths)


def _settled(disk: Disk, path: str) -> bytes:
    before = disk.stat(path)
    data = b"".join(chunks(disk, path))
    _require_same(disk, path, before)
    return data


def iterate_foreign_state(disk: Disk, paths: Sequence[str]) -> Iterator[tuple[str, TensorData]]:
    """Yield the tensors of files that have no manifest one by one; see `read_foreign_state`."""
    headers = read_foreign_headers(disk, paths)
    before = [disk.stat(path) for path in paths]
    for path, header, stat in zip(paths, headers, before, strict=True):
        for name, tensor in header.tensors.items():
            data = disk.read_at(path, header.data_offset + tensor.start, tensor.end - tensor.start)
            _require_same(disk, path, stat)
            yield name, TensorData(tensor.dtype, tensor.shape, data)


def read_foreign_headers(disk: Disk, paths: Sequence[str]) -> list[Header]:
    """Return the headers of files that have no manifest; each tensor is in one of them only."""
    headers = [read_weights_header(disk, path) for path in paths]
    signature(headers)
    return headers


def _require_same(disk: Disk, path: str, before: FileStat) -> None:
    if disk.stat(path) != before:
        raise TryAgainError("the file was written again while it was read", path=path)


def read_headers(disk: Disk, step_path: str, manifest: Manifest) -> list[Header]:
    """Return the headers of a step's shards; each tensor is in one of them only."""
    headers = [read_weights_header(disk, f"{step_path}/{record.name}") for record in manifest.shards]
    signature(headers)
    return headers


def list_tensors(headers: Sequence[Header]) -> list[TensorInfo]:
    """Return name, dtype and shape of each tensor, in the order of the files."""
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def _unencoded(name: str, value: Any) -> _Unencoded:
    if not isinstance(name, str) or name == METADATA:
        raise UsageError(f"not a tensor name: {name!r}")
    if isinstance(value, tuple) and len(value) == _TRIPLE:
        dtype, shape = value[0], value[1]
    else:
        dtype, shape = getattr(value, "dtype", ""), getattr(value, "shape", ())
        dtype = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    dtype = _DTYPES.get(str(dtype), dtype)
    if dtype not in DTYPE_BITS:
        kind = type(value).__name__
        raise UsageError(f"tensor {name!r} is a {kind} of a dtype that safetensors does not have")
    return _Unencoded(name, dtype, tuple(int(length) for length in shape), value)


def _data(source: _Unencoded) -> bytes | memoryview:
    value = source.value
    if isinstance(value, tuple):
        return memoryview(value[2]).cast("B")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return memoryview(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    if value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("<"))
    if not value.flags.c_contiguous:
        value = value.copy(order="C")
    return memoryview(value.reshape(-1).view("uint8"))
