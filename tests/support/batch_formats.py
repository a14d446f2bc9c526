"""Batches of other formats, by a writer of the tests' own: what earlier releases wrote must not follow the product.

`data/batch_format_1.parquet` was written by release 0.1.0 (commit 2320d0c). Nothing here may change.
"""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from support.paths import TESTS

RELEASED = str(TESTS / "data" / "batch_format_1.parquet")


def _list_of(kind):
    return pa.list_(pa.field("element", kind, nullable=False))


FORMAT_1 = pa.schema(
    [
        pa.field("tokens", _list_of(pa.int32()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("logprobs", _list_of(pa.float32()), nullable=False),
        pa.field("action_mask", _list_of(pa.bool_()), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("rollout", pa.int32(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("token_steps", _list_of(pa.int64()), nullable=True),
        pa.field("created_at", pa.float64(), nullable=False),
        pa.field("info", pa.string(), nullable=False),
    ],
    metadata={"protocol": "1"},
)


def write_format_1(rows):
    """Return a batch of format 1 with these rows, each a dictionary of all its columns."""
    return seal(pa.Table.from_pylist(rows, schema=FORMAT_1))


def seal(table):
    """Return a table as a plain Parquet file with the seal before its footer."""
    sink = io.BytesIO()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, sink, row_group_size=4096, write_page_checksum=True, **options)
    data = sink.getvalue()
    split = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    digest = f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}".encode()
    return data[:split] + digest + data[split:]


def changed(data, columns=None, metadata=None):
    """Return a batch with other values in some columns, or with other metadata."""
    table = pq.read_table(pa.BufferReader(data))
    for name, values in (columns or {}).items():
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return seal(table if metadata is None else table.replace_schema_metadata(metadata))
