"""The format of a batch: its number, which is independent of the protocol's, its schema, and values as Arrow columns.

A change of the schema is a new number.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

import pyarrow as pa

from syncd.errors import CorruptDataError, ProtocolTooNewError, UsageError
from syncd.experience.model import Experience, Span, TurnReward
from syncd.extras import upgrade_command

FORMAT = 2  # the format that is written and read

_MAX_DIGITS = 8


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind, nullable=False))


def _struct_of(**kinds: Any) -> Any:
    return pa.struct([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


SCHEMA: Any = pa.schema(
    [
        pa.field(name, kind, nullable=name in ("turn_rewards", "teacher_logprobs", "unproven"))
        for name, kind in {
            "tokens": _list_of(pa.int32()),
            "prompt_length": pa.int32(),
            "logprobs": _list_of(pa.float32()),
            "action_mask": _list_of(pa.bool_()),
            "reward": pa.float32(),
            "group": pa.string(),
            "task": pa.string(),
            "rollout": pa.int32(),
            "segment": pa.int32(),
            "segments": pa.int32(),
            "generation": pa.int64(),
            "step": pa.int64(),
            "spans": _list_of(_struct_of(start=pa.int32(), generation=pa.int64(), step=pa.int64())),
            "turn_rewards": _list_of(_struct_of(end=pa.int32(), reward=pa.float32())),
            "teacher_logprobs": _list_of(pa.float32()),
            "unproven": _list_of(pa.bool_()),
            "created_at": pa.float64(),
            "info": pa.string(),
        }.items()
    ],
    metadata={"format": str(FORMAT), "protocol": "2"},
)
"""The columns of a batch. `protocol` was what said the format before format 2; it stays in what is written."""


def check_format(metadata: Mapping[bytes, bytes], path: str) -> None:
    named = _number(metadata.get(b"format"), path)
    protocol = _number(metadata.get(b"protocol"), path)
    if named is None and protocol is not None and protocol > 1:
        raise _too_new(f"a batch of protocol {protocol}, which names no format", path)
    if named is not None and named > FORMAT:
        raise _too_new(f"a batch of format {named}, and this release reads format {FORMAT}", path)
    if named != FORMAT:
        raise CorruptDataError("its metadata names no format of a batch", path=path)


def _too_new(what: str, path: str) -> ProtocolTooNewError:
    return ProtocolTooNewError(
        f"{what}: upgrade syncd",
        path=path,
        hint=upgrade_command(),
    )


def _number(written: bytes | None, path: str) -> int | None:
    if written is None:
        return None
    if not written.isdigit() or len(written) > _MAX_DIGITS:
        raise CorruptDataError("its metadata names no format of a batch", path=path)
    return int(written)


MAX_ITEMS = 1 << 20
"""The most spans, and rewards of turns, of one batch: in memory they are several times as large as in the file."""

_CODES = {"int32": "i", "int64": "q", "float": "f", "double": "d"}
_STRUCTS: dict[str, Callable[..., Any]] = {"spans": Span._make, "turn_rewards": TurnReward._make}


def check_items(name: str, count: int) -> None:
    if count > MAX_ITEMS:
        raise UsageError(f"{name}: {count} in one batch where at most {MAX_ITEMS} are accepted")


def column(name: str, kind: Any, experiences: Sequence[Experience]) -> Any:
    if name == "info":
        return pa.array([experience.info_text for experience in experiences], kind)
    values = [getattr(experience, name) for experience in experiences]
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    present = [value for value in values if value is not None]
    if not present:
        return pa.nulls(len(values), kind)
    items = _structs(name, present, kind.value_type) if name in _STRUCTS else _plain(present, kind.value_type)
    return _lists(values, items, kind)


def values(name: str, kind: Any, stored: Any) -> list[Any]:
    """Return a field of each experience from its column, which has nulls only where the field is optional."""
    return list(chain.from_iterable(_values(name, kind, chunk) for chunk in stored.chunks))


def _values(name: str, kind: Any, chunk: Any) -> Sequence[Any]:
    if not pa.types.is_list(kind):
        return _scalars(chunk)
    if chunk.null_count == len(chunk):
        return [None] * len(chunk)
    if name in _STRUCTS:
        check_items(name, len(chunk.values))
        items = list(map(_STRUCTS[name], zip(*map(_scalars, chunk.values.flatten()), strict=True)))
        return [None if ends is None else tuple(items[ends[0] : ends[1]]) for ends in _ends(chunk, 1)]
    if pa.types.is_boolean(kind.value_type):
        flat = _bytes(chunk.values.cast(pa.uint8()))
        return [None if ends is None else bytes(flat[ends[0] : ends[1]]) for ends in _ends(chunk, 1)]
    code, flat = _CODES[str(kind.value_type)], _bytes(chunk.values)
    width = array(code).itemsize
    return [
        None if ends is None else array(code, bytes(flat[ends[0] : ends[1]])) for ends in _ends(chunk, width)
    ]


def _ends(chunk: Any, width: int) -> Sequence[tuple[int, int] | None]:
    """Return where the items of each list begin and end, in units of `width`."""
    places = [offset * width for offset in _scalars(chunk.offsets)]
    pairs = list(pairwise(places))
    if not chunk.null_count:
        return pairs
    return [ends if valid else None for ends, valid in zip(pairs, chunk.is_valid().to_pylist(), strict=True)]


def _scalars(column: Any) -> Sequence[Any]:
    """Return the values of a column without nulls; numbers from its memory, which takes a tenth of the time."""
    code = _CODES.get(str(column.type))
    if code is None:
        texts: list[Any] = column.to_pylist()
        return texts
    return array(code, bytes(_bytes(column))).tolist()


def _bytes(column: Any) -> memoryview:
    width = column.type.bit_width // 8
    whole = memoryview(column.buffers()[1] or b"").cast("B")
    return whole[column.offset * width : (column.offset + len(column)) * width]


def _lists(values: Sequence[Any], items: Any, kind: Any) -> Any:
    lengths = [0 if value is None else len(value) for value in values]
    offsets = array("i", accumulate(lengths, initial=0))
    missing = pa.array([value is None for value in values], pa.bool_()) if None in values else None
    starts = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])
    return pa.ListArray.from_arrays(starts, items, type=kind, mask=missing)


def _plain(arrays: Sequence[Any], kind: Any) -> Any:
    flat = b"".join([memoryview(value).cast("B") for value in arrays])
    # Arrow packs booleans into bits; here they are bytes.
    stored = pa.uint8() if pa.types.is_boolean(kind) else kind
    items = pa.Array.from_buffers(stored, sum(map(len, arrays)), [None, pa.py_buffer(flat)])
    return items.cast(kind) if stored is not kind else items


def _structs(name: str, lists: Sequence[Any], kind: Any) -> Any:
    items = list(chain.from_iterable(lists))
    check_items(name, len(items))
    fields = [kind.field(number) for number in range(kind.num_fields)]
    columns = [pa.array(map(itemgetter(at), items), field.type) for at, field in enumerate(fields)]
    return pa.StructArray.from_arrays(columns, fields=fields)
