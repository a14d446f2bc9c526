"""The format of a batch: what is written comes back, what is anything else is refused."""

import io
import json
import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.experiences import make, whole_group

from syncd.errors import CorruptDataError, ProtocolTooNewError, UsageError
from syncd.experience import model, table
from syncd.experience.model import Experience
from syncd.experience.table import SCHEMA, decode_batch, encode_batch
from syncd.extras import upgrade_command

NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def experiences(draw, **shared):
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    several = lambda element, count=response: st.lists(element, min_size=count, max_size=count)  # noqa: E731
    starts = [0, *sorted(draw(st.sets(st.integers(1, response - 1)) if response > 1 else st.just(set())))]
    versions = draw(several(st.tuples(st.integers(0, 2**53), st.integers(0, 2**53)), len(starts)))
    generation, step = min(versions)
    fields = {
        "reward": draw(FLOATS),
        "group": draw(NAMES),
        "task": draw(NAMES),
        "rollout": draw(st.integers(0, 2**31 - 1)),
    }
    return Experience(
        tokens=draw(several(st.integers(0, 2**31 - 1), prompt + response)),
        prompt_length=prompt,
        logprobs=draw(several(FLOATS)),
        action_mask=draw(several(st.booleans())),
        generation=generation,
        step=step,
        spans=[(start, *version) for start, version in zip(starts, versions, strict=True)],
        teacher_logprobs=draw(st.none() | several(FLOATS)),
        unproven=draw(st.none() | several(st.booleans())),
        created_at=draw(st.floats(0, 1e12)),
        info=draw(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5))),
        **{**fields, **shared},
    )


@st.composite
def rollouts(draw):
    """Draw a rollout of one or more segments; the rewards of its turns, where there are any, add up to its own."""
    count = draw(st.integers(1, 3))
    turns = draw(st.none() | st.lists(st.integers(-8, 8), min_size=count, max_size=count))
    shared = {
        "group": draw(NAMES),
        "task": draw(NAMES),
        "rollout": draw(st.integers(0, 9)),
        "segments": count,
    }
    shared["reward"] = draw(FLOATS) if turns is None else float(sum(turns))
    return [
        draw(experiences(
            segment=number, turn_rewards=None if turns is None else [(1, float(turns[number]))], **shared
        ))
        for number in range(count)
    ]  # fmt: skip


@given(st.lists(rollouts(), min_size=1, max_size=4))
@settings(max_examples=60)
def test_batches_round_trip(drawn):
    batch = [segment for rollout in drawn for segment in rollout]
    assert decode_batch(encode_batch(batch), "x") == tuple(batch)


def test_pandas_reads_a_batch(tmp_path):
    path = tmp_path / "1.parquet"
    path.write_bytes(encode_batch([make(info={"answer": 7}), make(rollout=1, spans=[(0, 1, 3), (2, 2, 1)])]))
    frame = pd.read_parquet(path)
    assert list(frame.columns) == SCHEMA.names
    assert list(frame["tokens"][0]) == [7, 8, 10, 11, 12]
    assert list(frame["action_mask"][0]) == [True, True, True]
    assert frame["unproven"][0] is None
    assert list(frame["spans"][0]) == [{"start": 0, "generation": 1, "step": 0}]
    assert [span["step"] for span in frame["spans"][1]] == [3, 1]
    assert json.loads(frame["info"][0]) == {"answer": 7}
    assert pq.read_schema(path).metadata[b"format"] == b"2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [1, -1, 2]},
        {"tokens": [1, 2**31, 2]},
        {"tokens": [1, "a", 2]},
        {"prompt_length": 0},
        {"prompt_length": 3},
        {"logprobs": [0.0]},
        {"logprobs": [0.0, float("nan")]},
        {"logprobs": [0.0, float("-inf")]},
        {"action_mask": [1, 2]},
        {"reward": float("inf")},
        {"reward": 1e39},
        {"group": ""},
        {"group": "a\nb"},
        {"task": "x" * 257},
        {"rollout": -1},
        {"step": 2**60},
        {"generation": True},
        {"segment": 1},
        {"segments": 0},
        {"segment": -1, "segments": 2},
        {"spans": [(1, 1, 1)]},
        {"spans": [(0, 1, 1), (0, 1, 1)]},
        {"spans": [(0, 1, 1), (2, 1, 1)]},
        {"spans": [(0, 1, 0)]},
        {"spans": [(0, 0, 9)]},
        {"spans": [(0, 1, 2**60)]},
        {"spans": [(0, 1)]},
        {"spans": [(0.0, 1, 1), (1, 1, 1)]},
        {"spans": 5},
        {"turn_rewards": [(1, 0.5)]},
        {"turn_rewards": []},
        {"turn_rewards": [(0, 1.0)]},
        {"turn_rewards": [(3, 1.0)]},
        {"turn_rewards": [(2, 0.5), (1, 0.5)]},
        {"turn_rewards": [(1, float("nan"))]},
        {"turn_rewards": [(1, "a")]},
        {"teacher_logprobs": [0.0]},
        {"teacher_logprobs": [0.0, float("inf")]},
        {"unproven": [True]},
        {"unproven": [2, 0]},
        {"created_at": float("nan")},
        {"info": {"x": float("nan")}},
        {"info": {"x": object()}},
        {"info": {"x": "y" * model.MAX_INFO}},
        {"info": 5},
    ],
)
def test_an_invalid_experience_is_refused_with_the_field(wrong):
    right = {
        "tokens": [1, 2, 3],
        "prompt_length": 1,
        "logprobs": [0.0, -1.0],
        "action_mask": [True, False],
        "reward": 1,
        "group": "g",
        "task": "t",
        "rollout": 0,
        "generation": 1,
        "step": 1,
    }
    Experience(**right)
    with pytest.raises(UsageError) as caught:
        Experience(**{**right, **wrong})
    assert next(iter(wrong)) in caught.value.message


def test_batches_and_experiences_over_the_size_limits_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="1 to 4096"):
        encode_batch([])
    with pytest.raises(UsageError, match="1 to 4096"):
        encode_batch([make()] * 4097)
    monkeypatch.setattr(table, "MAX_BYTES", 100)
    with pytest.raises(UsageError, match="bytes"):
        encode_batch([make()])
    monkeypatch.setattr(model, "MAX_TOKENS", 4)
    with pytest.raises(UsageError, match="at most 4"):
        make()


def test_truncated_batches_are_refused():
    data = encode_batch(whole_group("g"))
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptDataError):
            decode_batch(data[:length], "x")


def test_random_bytes_are_refused():
    chance = random.Random(1)
    for _ in range(200):
        noise = chance.randbytes(chance.randrange(4096))
        footer = min(len(noise), chance.randrange(300)).to_bytes(4, "little")
        for data in (noise, b"PAR1" + noise + footer + b"PAR1"):
            with pytest.raises(CorruptDataError):
                decode_batch(data, "x")


def test_a_changed_byte_is_refused_before_parsing():
    """A bit changed in a footer crashes Arrow: it must never come so far."""
    data, chance = encode_batch(whole_group("g", 4)), random.Random(2)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptDataError, match=r"seal|complete|footer"):
            decode_batch(bytes(changed), "x")


def test_parquet_files_without_a_seal_are_refused_before_parsing(monkeypatch):
    monkeypatch.setattr(table.pq, "ParquetFile", None)
    sink = io.BytesIO()
    pq.write_table(pa.table({"tokens": [[1, 2]]}), sink)
    with pytest.raises(CorruptDataError, match="seal"):
        decode_batch(sink.getvalue(), "x")


def _write(arrow, **options):
    sink = io.BytesIO()
    options = {"compression": "none", "use_dictionary": False, **options}
    pq.write_table(arrow, sink, **options)
    return table.seal_batch(sink.getvalue())


def _table(**columns):
    arrow = pq.read_table(pa.BufferReader(encode_batch(whole_group("g"))))
    for name, value in columns.items():
        place = arrow.column_names.index(name)
        arrow = arrow.set_column(place, SCHEMA.field(name), pa.array(value, SCHEMA.field(name).type))
    return arrow


def test_a_sealed_batch_that_keeps_to_the_format_is_read():
    assert decode_batch(_write(_table()), "x") == tuple(whole_group("g"))


def _bombs():
    # Millions of equal values, which other encodings store in a few bytes.
    many = pa.array([[7] * (1 << 22)] * 2, SCHEMA.field("tokens").type)
    return _table().set_column(0, SCHEMA.field("tokens"), many)


HOSTILE = {
    "another table": lambda: _write(pa.table({"a": [1]})),
    "no protocol": lambda: _write(_table().replace_schema_metadata({})),
    "a protocol that is no number": lambda: _write(_table().replace_schema_metadata({"protocol": "x"})),
    "a column less": lambda: _write(_table().drop_columns(["reward"])),
    "compressed": lambda: _write(_table(), compression="snappy"),
    "a dictionary": lambda: _write(_table(), use_dictionary=True),
    "row groups": lambda: _write(_table(), row_group_size=1),
    "no rows": lambda: _write(_table().slice(0, 0)),
    "many rows": lambda: _write(pa.concat_tables([_table()] * 2049)),
    "a large footer": lambda: _write(
        _table().replace_schema_metadata({"protocol": "1", "x": "y" * (2 << 20)})
    ),
    "many entries": lambda: _write(
        _table().replace_schema_metadata({"protocol": "1"} | {str(i): "" for i in range(1 << 15)})
    ),
    "a list bomb": lambda: _write(_bombs(), use_dictionary=True, compression="zstd"),
    "a plain list bomb": lambda: _write(_bombs()),
    "NaN": lambda: _write(_table(reward=[1.0, float("nan")])),
    "info that is a list": lambda: _write(_table(info=["{}", "[]"])),
    "info that nests": lambda: _write(_table(info=["{}", '{"a":' + "[" * 20000 + "]" * 20000 + "}"])),
    "a mask of another length": lambda: _write(_table(action_mask=[[True], [True]])),
    "a name of other lines": lambda: _write(_table(group=["g", "g\n"])),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_batch_files_are_refused(what):
    data = HOSTILE[what]()
    with pytest.raises(CorruptDataError):
        decode_batch(data, "x")


def test_a_batch_of_a_newer_protocol_is_refused_with_an_upgrade_hint():
    with pytest.raises(ProtocolTooNewError) as caught:
        decode_batch(_write(_table().replace_schema_metadata({"protocol": "2"})), "x")
    assert caught.value.hint == upgrade_command()
