"""What the parser accepts the safetensors library accepts with the same meaning, and nearly the reverse."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_safetensors import bombs, check, check_memory, fuzz, parsed

from syncd.errors import CorruptDataError
from syncd.protocol.safetensors import DTYPE_BITS, parse_header

TEXT = st.text(max_size=12)


@st.composite
def tensors(draw):
    """Return the headers and the data of files that nothing is wrong with."""
    header, position = {}, 0
    for name in draw(st.lists(TEXT.filter(lambda name: name != "__metadata__"), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        shape += [8] * (math.prod(shape) * DTYPE_BITS[dtype] % 8 > 0)
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return header, draw(st.binary(min_size=position, max_size=position))


@st.composite
def files(draw):
    """Return whole files, their entries in any order."""
    header, data = draw(tensors())
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(TEXT, TEXT, max_size=3))
    shuffled = dict(draw(st.permutations(sorted(header.items(), key=lambda item: item[0]))))
    text = json.dumps(shuffled, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    text += b" " * draw(st.integers(0, 8))
    return struct.pack("<Q", len(text)) + text + data


@given(files())
def test_parser_and_library_accept_valid_files_alike(data):
    assert check(data)


@given(files(), st.data())
def test_parser_and_library_agree_on_damaged_files(data, draw):
    at = draw.draw(st.integers(0, len(data)))
    until = draw.draw(st.integers(at, min(len(data), at + 4)))
    check(data[:at] + draw.draw(st.binary(max_size=4)) + data[until:])


@given(files(), st.integers(0, 1 << 64))
def test_a_file_of_another_length_is_refused(data, size):
    if size != len(data):
        with pytest.raises(CorruptDataError):
            parse_header(data, size)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(sorted(DTYPE_BITS)) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F16"]) | VALUES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 8), min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.dictionaries(TEXT | st.just("__metadata__"), RECORDS | VALUES, max_size=3) | VALUES


@given(HEADERS, st.binary(max_size=8))
def test_parser_and_library_agree_on_any_json_header(header, data):
    text = json.dumps(header).encode()
    check(struct.pack("<Q", len(text)) + text + data)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused_as_corrupt(data):
    parsed(data)
    parsed(struct.pack("<Q", max(0, len(data) - 1)) + data)


def test_a_fixed_number_of_fuzzed_files_agrees_with_the_library(record_line):
    tried, accepted = fuzz(20240229, count=12_000)
    record_line(f"safetensors fuzzing: {tried} inputs, {accepted} accepted, seed 20240229")
    assert tried == 12_000
    assert accepted > 1000


@pytest.mark.parametrize("bomb", list(bombs()), ids=lambda data: ascii(data[8:30]))
def test_a_header_bomb_uses_bounded_memory(bomb):
    check_memory(bomb)
