"""The format of a batch: one Parquet file of plain, uncompressed columns, with a seal before its footer.

A single bit changed in a footer can crash Arrow's decoder, and the process with it. So the digest of the whole file
stands between the pages and the footer, where no Parquet reader looks, and nothing is parsed before it is checked.

Plain and uncompressed on purpose: every value then takes its bytes in the file, so that the size of the file bounds
what decoding it can take, whatever its metadata claims. The metadata is looked at before any page is decoded.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from syncd.errors import CorruptDataError, ProtocolTooNewError, UsageError
from syncd.experience.model import Experience
from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.documents import PROTOCOL

MAX_ROWS = 4096
"""Experiences of one batch."""

MAX_BYTES = 256 << 20
"""Size of one batch file."""

_MAGIC = b"PAR1"
_TAIL = 8
_SEAL = len(f"{DEFAULT}:") + 32
_MAX_FOOTER = 1 << 20
_MAX_ITEMS = 1 << 14
_ENCODINGS = frozenset({"PLAIN", "RLE"})


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind, nullable=False))


_COLUMNS = (
    ("tokens", _list_of(pa.int32())),
    ("prompt_length", pa.int32()),
    ("logprobs", _list_of(pa.float32())),
    ("action_mask", _list_of(pa.bool_())),
    ("reward", pa.float32()),
    ("group", pa.string()),
    ("task", pa.string()),
    ("rollout", pa.int32()),
    ("generation", pa.int64()),
    ("step", pa.int64()),
    ("token_steps", _list_of(pa.int64())),
    ("created_at", pa.float64()),
    ("info", pa.string()),
)
_NULLABLE = "token_steps"
SCHEMA: Any = pa.schema(
    [pa.field(name, kind, nullable=name == _NULLABLE) for name, kind in _COLUMNS],
    metadata={"protocol": str(PROTOCOL)},
)


def encode_batch(experiences: Sequence[Experience]) -> bytes:
    """Return the bytes of a batch.

    Raises:
        UsageError: It is empty, or larger than a batch may be.
    """
    if not 0 < len(experiences) <= MAX_ROWS:
        raise UsageError(f"a batch has 1 to {MAX_ROWS} experiences, not {len(experiences)}")
    table = pa.table([_column(name, kind, experiences) for name, kind in _COLUMNS], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=MAX_ROWS,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    data = seal_batch(sink.getvalue().to_pybytes())
    if len(data) > MAX_BYTES:
        raise UsageError(f"a batch of {len(data)} bytes where at most {MAX_BYTES} are taken")
    return data


def seal_batch(data: bytes) -> bytes:
    """Return a Parquet file with the digest of it all before its footer."""
    split = _footer_start(data)
    return b"".join((data[:split], _digest(data[:split], data[split:]), data[split:]))


def decode_batch(data: bytes, path: str) -> tuple[Experience, ...]:
    """Return the experiences of a batch file that anybody may have written.

    Raises:
        CorruptDataError: It is not a batch.
        ProtocolTooNewError: Its format is newer than this code.
    """
    _check_seal(data, path)
    try:
        return _decode(data, path)
    except (
        pa.ArrowException,
        UsageError,
        ValueError,
        KeyError,
        OSError,
        MemoryError,
        RecursionError,
    ) as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        raise CorruptDataError(
            f"not a batch of experiences: {type(error).__name__}: {reason}", path=path
        ) from None


def _check_seal(data: bytes, path: str) -> None:
    if len(data) < _SEAL + 2 * _TAIL or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise CorruptDataError("not a whole Parquet file", path=path)
    split = _footer_start(data)
    if split < _SEAL or len(data) - split > _MAX_FOOTER:
        raise CorruptDataError(f"a footer of {len(data) - split} bytes", path=path)
    view = memoryview(data)
    if view[split - _SEAL : split] != _digest(view[: split - _SEAL], view[split:]):
        raise CorruptDataError(
            "its content does not match its seal: torn, changed, or not by syncd", path=path
        )


def _footer_start(data: bytes) -> int:
    return len(data) - _TAIL - int.from_bytes(data[-_TAIL:-4], "little")


def _digest(*parts: bytes | memoryview) -> bytes:
    state = hasher(DEFAULT)
    for part in parts:
        state.update(part)
    return f"{DEFAULT}:{state.hexdigest()}".encode()


def _decode(data: bytes, path: str) -> tuple[Experience, ...]:
    file = pq.ParquetFile(
        pa.BufferReader(data),
        thrift_string_size_limit=_MAX_FOOTER,
        thrift_container_size_limit=_MAX_ITEMS,
        page_checksum_verification=True,
        pre_buffer=False,
    )
    _check_protocol(file.schema_arrow.metadata or {}, path)
    _check_metadata(file, len(data), path)
    table = file.read(use_threads=False)
    table.validate(full=True)
    columns = [list(_values(table.column(name), kind)) for name, kind in _COLUMNS]
    return tuple(_experience(row) for row in zip(*columns, strict=True))


def _check_protocol(metadata: dict[bytes, bytes], path: str) -> None:
    written = metadata.get(b"protocol", b"")
    if not written.isdigit() or not 0 < len(written) <= _TAIL:
        raise CorruptDataError("its metadata has no protocol", path=path)
    if int(written) > PROTOCOL:
        raise ProtocolTooNewError(
            f"written by protocol {int(written)}, this is protocol {PROTOCOL}",
            path=path,
            hint="pip install --upgrade 'syncd[experience]'",
        )


def _check_metadata(file: Any, size: int, path: str) -> None:
    metadata = file.metadata
    if not file.schema_arrow.equals(SCHEMA, check_metadata=False):
        raise CorruptDataError("its columns are not those of a batch", path=path)
    if not 0 < metadata.num_rows <= MAX_ROWS or metadata.num_row_groups != 1:
        raise CorruptDataError(f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups", path=path)
    group = metadata.row_group(0)
    for column in map(group.column, range(metadata.num_columns)):
        if column.compression != "UNCOMPRESSED" or not _ENCODINGS.issuperset(column.encodings):
            raise CorruptDataError(f"column {column.path_in_schema} is not plain and uncompressed", path=path)
        # A mask takes a bit a value; nothing takes less.
        if not 0 <= column.num_values <= 8 * size or column.total_uncompressed_size > size:
            raise CorruptDataError(
                f"column {column.path_in_schema} claims more than the file holds", path=path
            )


def _column(name: str, kind: Any, experiences: Iterable[Experience]) -> Any:
    if name == "info":
        return pa.array([experience.info_text for experience in experiences], kind)
    values = [getattr(experience, name) for experience in experiences]
    return _list_column(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def _list_column(values: Sequence[Any], kind: Any) -> Any:
    offsets, flat = array("i", [0]), bytearray()
    for value in values:
        flat += b"" if value is None else memoryview(value).cast("B")
        offsets.append(offsets[-1] + (0 if value is None else len(value)))
    missing = pa.array([value is None for value in values], pa.bool_())
    stored = _stored(kind.value_type)
    items = pa.Array.from_buffers(stored, offsets[-1], [None, pa.py_buffer(flat)]).cast(kind.value_type)
    starts = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])
    return pa.ListArray.from_arrays(starts, items, type=kind, mask=missing)


def _stored(kind: Any) -> Any:
    # Arrow packs booleans into bits; here they are bytes.
    return pa.uint8() if pa.types.is_boolean(kind) else kind


_CODES = {"int32": "i", "int64": "q", "float": "f"}


def _values(column: Any, kind: Any) -> Iterator[Any]:
    if not pa.types.is_list(kind):
        yield from column.to_pylist()
        return
    for chunk in column.chunks:
        yield from _lists(chunk, kind.value_type)


def _lists(chunk: Any, kind: Any) -> Iterator[Any]:
    items, offsets = chunk.values.cast(_stored(kind)), chunk.offsets.to_pylist()
    width = items.type.bit_width // 8
    view = memoryview(items.buffers()[1] or b"").cast("B")[items.offset * width :]
    for place, valid in enumerate(chunk.is_valid().to_pylist()):
        piece = bytes(view[offsets[place] * width : offsets[place + 1] * width])
        yield _packed(piece, kind) if valid else None


def _packed(piece: bytes, kind: Any) -> "bytes | array[Any]":
    return piece if pa.types.is_boolean(kind) else array(_CODES[str(kind)], piece)


def _experience(row: Sequence[Any]) -> Experience:
    fields = dict(zip((name for name, _ in _COLUMNS), row, strict=True))
    fields["info"] = json.loads(fields["info"])
    if type(fields["info"]) is not dict:
        raise ValueError("info is not a JSON object")
    return Experience(**fields)
