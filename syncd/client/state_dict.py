"""State dicts in and out of safetensors shards, piece by piece; imports neither torch nor numpy.

An array or tensor that a caller passes brings its library with it; only its own methods are called.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError, TryAgainError, UsageError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.digest import chunks
from syncd.protocol.disk import Disk, FileStat
from syncd.protocol.documents import parse_json
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


class StateFile(NamedTuple):
    """One safetensors file of a step."""

    disk: Disk
    path: str
    # What the manifest says of it; None of what another framework wrote: only headers and lengths are checked then.
    record: FileRecord | None = None


def state_files(disk: Disk, step_path: str, records: Iterable[FileRecord]) -> list[StateFile]:
    return [StateFile(disk, f"{step_path}/{record.name}", record) for record in records]


def read_state(files: Sequence[StateFile]) -> dict[str, TensorData]:
    """Return the tensors of a step, every byte of them checked against its records."""
    tensors, headers = dict[str, TensorData](), []
    for file in files:
        data = _content(file)
        header = parse_header(bytes(data[: 8 + int.from_bytes(data[:8], "little")]), len(data), file.path)
        headers.append(header)
        for name, tensor in header.tensors.items():
            begin, end = header.data_offset + tensor.start, header.data_offset + tensor.end
            tensors[name] = TensorData(tensor.dtype, tensor.shape, data[begin:end])
    signature(headers)
    return tensors


def iterate_state(files: Sequence[StateFile]) -> Iterator[tuple[str, TensorData]]:
    """Return the tensors of a step, read one by one; every byte is checked against its records before."""
    for file in files:
        for _ in record_chunks(file.disk, file.path, file.record) if file.record else ():
            pass
    before = [None if file.record else file.disk.stat(file.path) for file in files]
    return _tensors(zip(files, _headers(files), before, strict=True))


def _tensors(
    files: Iterable[tuple[StateFile, Header, FileStat | None]],
) -> Iterator[tuple[str, TensorData]]:
    for file, header, stat in files:
        for name, tensor in header.tensors.items():
            offset, length = header.data_offset + tensor.start, tensor.end - tensor.start
            data = file.disk.read_at(file.path, offset, length)
            if stat is not None:
                _require_same(file, stat)
            yield name, TensorData(tensor.dtype, tensor.shape, data)


def list_tensors(files: Sequence[StateFile]) -> list[TensorInfo]:
    """Return name, dtype and shape of each tensor, in the order of the files."""
    tensors = [tensor for header in _headers(files) for tensor in header.tensors.values()]
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


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
        names = set(parse_json(disk.read(path))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError("not an index of weights", path=path) from error
    if odd := [name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)]:
        raise CorruptDataError(f"the index names {odd[0]!r}, which is no shard in this directory", path=path)
    return names


def _content(file: StateFile) -> memoryview:
    if file.record is None:
        before = file.disk.stat(file.path)
        content = b"".join(chunks(file.disk, file.path))
        _require_same(file, before)
        return memoryview(content)
    whole, end = bytearray(file.record.size), 0
    for piece in record_chunks(file.disk, file.path, file.record):
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return memoryview(whole).toreadonly()


def _require_same(file: StateFile, before: FileStat) -> None:
    if file.disk.stat(file.path) != before:
        raise TryAgainError("the file was written again while it was read", path=file.path)


def _headers(files: Sequence[StateFile]) -> list[Header]:
    """Return the headers of the files of a step; each tensor is in one of them only."""
    headers = [read_weights_header(file.disk, file.path) for file in files]
    signature(headers)
    return headers


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
