"""Batches of other formats, by a writer of the tests' own, which does not follow the product."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash


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
