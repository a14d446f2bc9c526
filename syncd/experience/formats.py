"""The formats of a batch: a number independent of the protocol's, and one schema for each.

A change of the schema is a new number. Readers keep the schemas of all earlier numbers; writers write the newest.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from syncd.errors import CorruptDataError, ProtocolTooNewError, UsageError
from syncd.experience.model import Span

FORMAT = 2
"""The format that writers write, and the newest that readers read."""

_FIRST = 1
_MAX_DIGITS = 8


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind, nullable=False))


def _struct_of(**kinds: Any) -> Any:
    return pa.struct([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def _schema(columns: Mapping[str, Any], *, optional: set[str], metadata: Mapping[str, str]) -> Any:
    fields = [pa.field(name, kind, nullable=name in optional) for name, kind in columns.items()]
    return pa.schema(fields, metadata=dict(metadata))


_FIRST_COLUMNS = {
    "tokens": _list_of(pa.int32()),
    "prompt_length": pa.int32(),
    "logprobs": _list_of(pa.float32()),
    "action_mask": _list_of(pa.bool_()),
    "reward": pa.float32(),
    "group": pa.string(),
    "task": pa.string(),
    "rollout": pa.int32(),
}
_VERSION_COLUMNS = {"generation": pa.int64(), "step": pa.int64()}
_LAST_COLUMNS = {"created_at": pa.float64(), "info": pa.string()}

_SCHEMA_1 = _schema(
    {
        **_FIRST_COLUMNS,
        **_VERSION_COLUMNS,
        "token_steps": _list_of(pa.int64()),
        **_LAST_COLUMNS,
    },
    optional={"token_steps"},
    metadata={"protocol": "1"},
)

# Releases that read format 1 alone look at `protocol`: by the 2 they say what to upgrade. Later ones do not look.
_SCHEMA_2 = _schema(
    {
        **_FIRST_COLUMNS,
        "segment": pa.int32(),
        "segments": pa.int32(),
        **_VERSION_COLUMNS,
        "spans": _list_of(_struct_of(start=pa.int32(), generation=pa.int64(), step=pa.int64())),
        "turn_rewards": _list_of(_struct_of(end=pa.int32(), reward=pa.float32())),
        "teacher_logprobs": _list_of(pa.float32()),
        "unproven": _list_of(pa.bool_()),
        **_LAST_COLUMNS,
    },
    optional={"turn_rewards", "teacher_logprobs", "unproven"},
    metadata={"format": "2", "protocol": "2"},
)

SCHEMAS: dict[int, Any] = {_FIRST: _SCHEMA_1, FORMAT: _SCHEMA_2}
"""The schema of each format."""


def format_of(metadata: Mapping[bytes, bytes], path: str) -> int:
    """Return the format that a file's metadata says.

    Raises:
        CorruptDataError: It says none.
        ProtocolTooNewError: It is newer than this code.
    """
    own = _number(metadata.get(b"format"), path)
    if own is None:
        # Format 1 names no format but the protocol, which was 1.
        protocol = _number(metadata.get(b"protocol"), path)
        if protocol is not None and protocol > _FIRST:
            raise _too_new(f"a batch of protocol {protocol}, which says no format", path)
        own = protocol
    elif own > FORMAT:
        raise _too_new(f"a batch of format {own}, and this release reads formats up to {FORMAT}", path)
    if own not in SCHEMAS:
        raise CorruptDataError("its metadata names no format of a batch", path=path)
    return own


def _too_new(what: str, path: str) -> ProtocolTooNewError:
    return ProtocolTooNewError(
        f"{what}: upgrade syncd", path=path, hint="pip install --upgrade 'syncd[experience]'"
    )


def _number(written: bytes | None, path: str) -> int | None:
    if written is None:
        return None
    if not written.isdigit() or len(written) > _MAX_DIGITS:
        raise CorruptDataError("its metadata names no format of a batch", path=path)
    return int(written)


def from_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of format 1: a whole rollout, of which nothing was to be proven.

    Its `token_steps` say no generation. The row's own is taken for all of them: of a rollout that a rewind
    interrupted, nobody recorded which tokens are of the later generation.

    Raises:
        UsageError: Its `token_steps` are not as long as the response.
    """
    fields = dict(fields)
    steps = fields.pop("token_steps")
    if steps is None:
        return fields
    if len(steps) != len(fields["logprobs"]):
        raise UsageError("not an experience: token_steps is not as long as the response")
    fields["spans"] = spans_of(steps, fields["generation"])
    fields["step"] = min([fields["step"], *steps])
    return fields


def spans_of(steps: Sequence[int], generation: int) -> tuple[Span, ...]:
    """Return the spans of response tokens whose steps are known one by one."""
    runs = groupby(enumerate(steps), key=lambda numbered: numbered[1])
    return tuple(Span(next(run)[0], generation, step) for step, run in runs)
