"""The format of a batch: one Parquet file of plain, uncompressed columns, with a seal before its footer.

A single bit changed in a footer can crash Arrow's decoder, and the process with it. So the digest of the whole file
stands between the pages and the footer, where no Parquet reader looks, and nothing is parsed before it is checked.

Plain and uncompressed on purpose: every value then takes its bytes in the file, so that the size of the file bounds
what decoding it can take, whatever its metadata claims. The metadata is looked at before any page is decoded.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from syncd.errors import CorruptDataError, UsageError, first_line
from syncd.experience.formats import SCHEMA, check_format, column, values
from syncd.experience.model import Experience, check_total
from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.documents import parse_json

_SHARED = ("segments", "group", "task", "rollout", "reward")


def rollouts(experiences: Sequence[Experience]) -> Iterator[tuple[Experience, ...]]:
    """Yield the rollouts of a batch, each with all its segments.

    Raises:
        UsageError: One is not whole, or its segments contradict each other; the message names row and field.
    """
    start = 0
    while start < len(experiences):
        first = experiences[start]
        if first.segments == 1:
            yield (first,)
        else:
            segments = tuple(experiences[start : start + first.segments])
            _check(segments, start)
            yield segments
        start += first.segments


def check_rollouts(experiences: Sequence[Experience]) -> None:
    """Refuse a batch with a rollout that is not whole.

    Raises:
        UsageError: As above.
    """
    if any(segment.segments > 1 for segment in experiences):
        deque(rollouts(experiences), maxlen=0)


def _check(segments: Sequence[Experience], start: int) -> None:
    first = segments[0]
    for number, row in enumerate(segments):
        if row.segment != number:
            raise UsageError(
                f"row {start + number}: segment is {row.segment} where {number} of {first.segments} is due: "
                "a rollout's segments are all in one batch, one after the other"
            )
        for name in _SHARED:
            if getattr(row, name) != getattr(first, name):
                raise UsageError(f"row {start + number}: {name} is not that of the rollout's first segment")
    if len(segments) < first.segments:
        raise UsageError(
            f"row {start}: segments: the rollout has {len(segments)} of its {first.segments} segments here"
        )
    try:
        check_total(segments)
    except UsageError as error:
        raise UsageError(f"row {start} is {error.message}") from None


MAX_ROWS = 4096
"""Experiences of one batch."""

MAX_BYTES = 256 << 20
"""Size of one batch file."""

_MAGIC = b"PAR1"
_TAIL = 8
_SEAL = len(f"{DEFAULT}:") + 32
_MAX_FOOTER = 1 << 20
_MAX_ENTRIES = 1 << 14
_ENCODINGS = frozenset({"PLAIN", "RLE"})


def encode_batch(experiences: Sequence[Experience]) -> bytes:
    """Return the bytes of a batch.

    Raises:
        UsageError: It is empty, larger than a batch may be, or has a rollout that is not whole.
    """
    if not 0 < len(experiences) <= MAX_ROWS:
        raise UsageError(f"a batch has 1 to {MAX_ROWS} experiences, not {len(experiences)}")
    check_rollouts(experiences)
    columns = [column(field.name, field.type, experiences) for field in SCHEMA]
    table = pa.table(columns, schema=SCHEMA)
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
        raise UsageError(f"a batch of {len(data)} bytes where at most {MAX_BYTES} are accepted")
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
        raise CorruptDataError(f"not a batch of experiences: {_reason(error)}", path=path) from None


def _reason(error: Exception) -> str:
    reason = first_line(error)[:300]
    return reason if isinstance(error, UsageError) else f"{type(error).__name__}: {reason}"


def _check_seal(data: bytes, path: str) -> None:
    if len(data) < _SEAL + 2 * _TAIL or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise CorruptDataError("not a complete Parquet file", path=path)
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
        thrift_container_size_limit=_MAX_ENTRIES,
        page_checksum_verification=True,
        pre_buffer=False,
    )
    check_format(file.schema_arrow.metadata or {}, path)
    _check_metadata(file, len(data), path)
    table = file.read(use_threads=False)
    table.validate(full=True)
    experiences = tuple(_experiences(table))
    check_rollouts(experiences)
    return experiences


def _check_metadata(file: Any, size: int, path: str) -> None:
    metadata = file.metadata
    if not file.schema_arrow.equals(SCHEMA, check_metadata=False):
        raise CorruptDataError("its columns are not those of a batch", path=path)
    if not 0 < metadata.num_rows <= MAX_ROWS or metadata.num_row_groups != 1:
        raise CorruptDataError(f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups", path=path)
    row_group = metadata.row_group(0)
    for leaf in map(row_group.column, range(metadata.num_columns)):
        if leaf.compression != "UNCOMPRESSED" or not _ENCODINGS.issuperset(leaf.encodings):
            raise CorruptDataError(f"column {leaf.path_in_schema} is not plain and uncompressed", path=path)
        # A mask takes a bit a value; nothing takes less.
        if not 0 <= leaf.num_values <= 8 * size or leaf.total_uncompressed_size > size:
            raise CorruptDataError(
                f"column {leaf.path_in_schema} says that it has more values than the file holds", path=path
            )


def _experiences(table: Any) -> list[Experience]:
    columns = [values(field.name, field.type, table.column(field.name)) for field in SCHEMA]
    experiences: list[Experience] = []
    for position, row in enumerate(zip(*columns, strict=True)):
        try:
            fields = dict(zip(SCHEMA.names, row, strict=True))
            fields["info"] = _info(fields["info"])
            experiences.append(Experience(**fields))
        except UsageError as error:
            raise UsageError(f"row {position} is {error.message}") from None
    return experiences


def _info(text: str) -> dict[str, Any]:
    try:
        info = parse_json(text)
    except ValueError as error:
        raise UsageError(f"not an experience: info is not JSON: {error}") from None
    if type(info) is not dict:
        raise UsageError("not an experience: info is not a JSON object")
    return info
