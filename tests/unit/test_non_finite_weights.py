"""NaN and infinity in the bytes of a shard: every format, every place, whatever the pieces."""

import itertools
import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.errors import NonFiniteError
from syncd.protocol.safetensors import DTYPE_BITS, parse_header
from syncd.publishing.finite import FiniteCheck

torch = pytest.importorskip("torch")

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""What another library makes of the bytes."""


def shard(*tensors):
    """Return a safetensors file of (name, dtype, bytes)."""
    entries, end = {}, 0
    for name, dtype, data in tensors:
        count = len(data) * 8 // DTYPE_BITS[dtype]
        entries[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors)


def look(content, *cuts):
    """Give a file to the check in pieces that end at these places."""
    check = FiniteCheck(parse_header(content, len(content)), "model.safetensors")
    places = [0, *sorted(cuts), len(content)]
    for start, end in itertools.pairwise(places):
        check.feed(content[start:end])


def is_finite(dtype, data):
    values = torch.frombuffer(bytearray(data), dtype=TORCH[dtype]) if data else torch.empty(0)
    return (values if dtype == "C64" else values.to(torch.float64)).isfinite().tolist()


@pytest.mark.parametrize("dtype", TORCH)
def test_every_non_finite_bit_pattern_of_each_format_is_refused(dtype):
    """All of 8 and 16 bits; of wider ones all patterns of the two last bytes, which are those that count."""
    size = DTYPE_BITS[dtype] // 8
    part = 4 if dtype == "C64" else size
    used = min(part, 2)
    patterns = [pattern.to_bytes(used, "little").rjust(part, b"\0") for pattern in range(1 << 8 * used)]
    elements = [pattern.rjust(size, b"\0") for pattern in patterns]
    good = is_finite(dtype, b"".join(elements))
    look(shard(("w", dtype, b"".join(one for one, finite in zip(elements, good, strict=True) if finite))))
    wrong = [one for one, finite in zip(elements, good, strict=True) if not finite]
    assert wrong
    for element in wrong:
        with pytest.raises(NonFiniteError, match=r"flat index 0:"):
            look(shard(("w", dtype, element)))


def bad(dtype):
    """Return one element that is not finite."""
    if dtype == "F8_E8M0":
        return b"\xff"
    return bytes(torch.tensor([math.nan], dtype=TORCH[dtype]).view(torch.uint8).tolist())


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(TORCH)), st.data())
def test_the_first_non_finite_value_is_named_for_any_split(dtype, draw):
    size = DTYPE_BITS[dtype] // 8
    count = draw.draw(st.integers(1, 40))
    places = draw.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
    elements = [b"\x01" * size] * count
    for place in places:
        elements[place] = bad(dtype)
    # An odd tensor before it moves it off every boundary; another format follows.
    content = shard(("odd", "U8", b"\xff" * 3), ("w.1", dtype, b"".join(elements)), ("after", "I8", b"\xff"))
    cuts = draw.draw(st.lists(st.integers(1, len(content) - 1), max_size=6, unique=True))
    with pytest.raises(NonFiniteError, match=rf"tensor 'w.1' .* flat index {min(places)}:") as raised:
        look(content, *cuts)
    assert raised.value.path == "model.safetensors"


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(TORCH)), st.binary(max_size=400), st.data())
def test_the_finite_check_agrees_with_torch_on_any_bytes(dtype, raw, draw):
    size = DTYPE_BITS[dtype] // 8
    data = raw[: len(raw) - len(raw) % size]
    content = shard(("w", dtype, data))
    cuts = draw.draw(st.lists(st.integers(1, len(content) - 1), max_size=4, unique=True))
    found = is_finite(dtype, data)
    if all(found):
        look(content, *cuts)
        return
    with pytest.raises(NonFiniteError, match=rf"flat index {found.index(False)}:"):
        look(content, *cuts)


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - set(TORCH)))
def test_formats_without_non_finite_values_are_not_checked(dtype):
    look(shard(("w", dtype, b"\xff" * 24)))


def lowest(dtype, count):
    """Return masks of the lowest number, whose bytes are nearly those of infinity, in every element."""
    values = torch.full((count,), torch.finfo(TORCH[dtype]).min, dtype=TORCH[dtype])
    return values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16", "F8_E5M2", "F8_E4M3"])
def test_the_lowest_finite_values_are_accepted(dtype):
    look(shard(("mask", dtype, lowest(dtype, 1 << 16))))
    with pytest.raises(NonFiniteError, match=f"flat index {1 << 16}:"):
        look(shard(("mask", dtype, lowest(dtype, 1 << 16) + bad(dtype))))


def test_tensors_without_elements_are_skipped():
    nan = struct.pack("<2f", 1.0, math.nan)
    content = shard(("none", "F32", b""), ("w", "F32", nan), ("last", "F16", b""))
    with pytest.raises(NonFiniteError, match=r"'w' .* flat index 1:"):
        look(content)
