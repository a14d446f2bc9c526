"""The plan of a load: every byte of a shard once, no element cut in two, nothing longer than its buffer."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncd.protocol.safetensors import DTYPE_BITS, parse_header
from syncd.transports.files.read_file import pieces_of
from syncd.transports.tensors import TensorMeta, compare
from syncd.transports.torch_tensors import put

NAMES = ("a", "b", "c", "d", "e", "f")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.sets(st.sampled_from(NAMES))
tensors = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from(["F32", "BF16", "U8", "F64"]), shapes), max_size=6
)


def header_of(described, padding=0):
    document, start = {}, 0
    for name, (dtype, shape) in described.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(document).encode() + b" " * padding
    return parse_header(len(text).to_bytes(8, "little") + text, 8 + len(text) + start)


@given(
    tensors,
    st.integers(0, 9),
    st.sampled_from([8, 16, 24, 64, 4096]),
    st.sets(st.sampled_from(NAMES)),
    st.booleans(),
)
def test_every_wanted_byte_is_read_exactly_once_into_its_tensor(described, padding, limit, wanted, whole):
    header = header_of(described, padding)
    pieces = list(pieces_of(header, dict.fromkeys(wanted), whole=whole, limit=limit))
    assert all(piece.length == sum(part.length for part in piece.parts) for piece in pieces)
    assert all(0 < piece.length <= limit for piece in pieces)
    reached = 0
    filled = dict.fromkeys(described, 0)
    for piece in pieces:
        assert piece.offset >= reached
        assert piece.offset == reached or not whole
        at = piece.offset
        for part in piece.parts:
            assert part.length > 0
            if part.name is not None:
                tensor = header.tensors[part.name]
                assert at == header.data_offset + tensor.start + part.start
                assert part.start == filled[part.name]
                assert part.start % (DTYPE_BITS[tensor.dtype] // 8) == 0
                filled[part.name] += part.length
            at += part.length
        reached = at
    if whole:
        assert reached == header.size
    sizes = {name: header.tensors[name].end - header.tensors[name].start for name in described}
    assert filled == {name: sizes[name] if name in wanted else 0 for name in described}


def test_unwanted_bytes_are_read_only_for_hashing():
    header = header_of({"a": ("F32", (4,)), "b": ("F32", (4,)), "c": ("F32", (4,))})
    (first, last) = pieces_of(header, {"a": None, "c": None}, whole=False)
    assert (first.length, last.length) == (16, 16)
    assert last.offset - first.offset == 32
    assert [len(piece.parts) for piece in pieces_of(header, {"a": None, "c": None}, whole=True)] == [4]


def test_many_small_tensors_are_read_in_few_vectored_calls():
    header = header_of({f"t{number}": ("F32", (1,)) for number in range(3000)})
    pieces = list(pieces_of(header, dict.fromkeys(header.tensors), whole=True))
    assert len(pieces) < 20
    assert all(len(piece.parts) <= 1024 for piece in pieces)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.booleans(), st.data())
def test_a_range_of_bytes_fills_exactly_its_elements(shape, turned, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    target = torch.full((2, *shape), -1)[0] if not turned else spread(shape)
    expected = torch.full((count,), -1)
    expected[start:stop] = torch.arange(start, stop)
    put(target, "I64", start * 8, torch.arange(start, stop).view(torch.uint8))
    assert torch.equal(target.reshape(-1), expected)


def spread(shape):
    """Return a tensor of a shape whose elements are neither in order nor side by side."""
    return torch.full((*shape[::-1], 2), -1)[..., 0].permute(*range(len(shape))[::-1])


@pytest.mark.parametrize(("start", "stop", "copies"), [(0, 60, 1), (1, 59, 5), (20, 40, 1)])
def test_whole_rows_are_filled_by_one_copy(monkeypatch, start, stop, copies):
    target, done, copy = spread((3, 4, 5)), [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args: done.append(args) or copy(*args))
    put(target, "I64", start * 8, torch.arange(start, stop).view(torch.uint8))
    assert len(done) == copies


F32, BF16 = TensorMeta("F32", (2, 3)), TensorMeta("BF16", (2, 3))


@pytest.mark.parametrize(
    ("offered", "aliases", "cast", "wrong"),
    [
        ({"a": F32}, {}, False, ()),
        ({}, {}, False, ("tensor 'a' is missing",)),
        ({"a": F32, "x": F32}, {}, False, ("tensor 'x' is not expected",)),
        ({"a": TensorMeta("F32", (3, 2))}, {}, True, ("tensor 'a' is F32[3, 2] instead of F32[2, 3]",)),
        ({"a": BF16}, {}, False, ("tensor 'a' is BF16[2, 3] instead of F32[2, 3]",)),
        ({"a": BF16}, {}, True, ()),
        ({"a": TensorMeta("I32", (2, 3))}, {}, True, ("tensor 'a' is I32[2, 3] instead of F32[2, 3]",)),
        ({"tied": F32}, {"tied": "a"}, False, ()),
        (
            {"tied": TensorMeta("F32", (6,))},
            {"tied": "a"},
            False,
            ("tensor 'tied' is F32[6] instead of F32[2, 3]",),
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(offered, aliases, cast, wrong):
    assert compare({"a": F32}, aliases, offered, cast=cast).wrong == wrong


def test_one_of_several_tied_names_is_used():
    aliases = {"head": "embed", "other": "embed"}
    every = dict.fromkeys(("embed", "head", "other"), F32)
    assert compare({"embed": F32}, aliases, every, cast=False).unused == {"head", "other"}
    del every["embed"]
    assert compare({"embed": F32}, aliases, every, cast=False).unused == {"other"}
    assert compare({"embed": F32}, aliases, {"head": F32}, cast=False).unused == frozenset()
