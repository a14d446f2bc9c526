"""The encoding `ulp1`: round trips over every kind of words, and nothing damaged is ever applied."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta import RECORD, SAME, TILE, ULP, ULP_SORTED, XOR, encode_frame_record, frame_checksum
from syncd.transports.delta import EncodedFrame, apply, encode, fold

LONG = bytes(TILE + 2)


def weights(count, seed=0):
    """Return bfloat16 words of normal weights, a few of them NaN with payloads, infinity, zero and denormal."""
    rng = np.random.default_rng(seed)
    words = ((rng.standard_normal(count) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    special = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0000, 0x8000, 0x0001], np.uint16)
    words[: min(count, special.size)] = special[:count]
    return words


def changed(old, share, seed=1, most=3):
    rng = np.random.default_rng(seed)
    new, chosen = old.copy(), rng.random(old.size) < share
    new[chosen] += rng.integers(1, most + 1, int(chosen.sum())).astype(np.uint16)
    return new


def applied(old, frame):
    target = old.copy()
    assert apply(target, EncodedFrame.from_bytes(frame.to_bytes())) is (frame.frame.method != SAME)
    return target


@pytest.mark.parametrize(
    ("share", "method"), [(0, SAME), (0.016, ULP_SORTED), (0.1, ULP), (0.4, ULP), (0.9, XOR)]
)
def test_a_tile_round_trips_at_each_density(share, method):
    old = weights(70_001)
    new = changed(old, share)
    frame = encode(old, new)
    assert frame.frame.method == method
    assert frame.frame.changed == np.count_nonzero(old != new)
    assert np.array_equal(applied(old, frame), new)


def test_a_sparse_delta_is_much_smaller_than_xor_and_than_coordinates():
    old = weights(1 << 20)
    new = changed(old, 0.016, most=1)
    count = np.count_nonzero(old != new)
    assert len(encode(old, new).to_bytes()) * 4.5 < 6 * count  # int32 and bf16


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("words", [1, 2, 3, 5, 1000])
def test_each_width_round_trips_from_offsets_that_are_no_multiple_of_it(width, words):
    rng = np.random.default_rng(words)
    memory = rng.integers(0, 256, words * width + 1, np.uint8).tobytes()
    old = memory[1:]  # not aligned
    new = bytes(byte ^ (index % 7 == 0) for index, byte in enumerate(old))
    frame = EncodedFrame.from_bytes(encode(memoryview(memory)[1:], new, width=width).to_bytes())
    target = bytearray(old)
    assert apply(target, frame)
    assert bytes(target) == new
    assert not apply(target, frame)  # once more: it is the result already


words_of = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300)


@settings(max_examples=300, deadline=None)
@given(words_of, st.lists(st.tuples(st.integers(0, 299), st.integers(0, 0xFFFF))))
def test_any_words_round_trip(before, writes):
    old = np.array(before, np.uint16)
    new = old.copy()
    for place, word in writes:
        new[place % new.size] = word
    assert np.array_equal(applied(old, encode(old, new)), new)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([254, 255, 256, 509, 510, 511, 1020, 65_534]),
    st.sampled_from([1, 254, 255, 256, 32_768, 65_535]),
)
def test_long_gaps_and_large_changes_round_trip(gap, distance):
    old = np.zeros(70_000, np.uint16)
    new = old.copy()
    new[gap] = new[gap + 1] = distance
    assert np.array_equal(applied(old, encode(old, new)), new)


def test_a_target_that_is_another_tile_is_left_as_it_is():
    old = weights(5000)
    frame, other = encode(old, changed(old, 0.02)), weights(5000, seed=9)
    before = other.copy()
    with pytest.raises(CorruptDataError, match="neither what the frame changes nor its result"):
        apply(other, frame)
    with pytest.raises(CorruptDataError, match="a tile of 9998 bytes"):
        apply(other[1:], frame)
    assert np.array_equal(before, other)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_every_flipped_bit_and_every_truncation_is_refused_before_anything_is_written(share):
    old = weights(200)
    data = encode(old, changed(old, share, most=300)).to_bytes()
    target = bytearray(old.tobytes())

    def refused(damaged):
        with pytest.raises(CorruptDataError):
            apply(target, EncodedFrame.from_bytes(damaged))
        assert target == old.tobytes()

    for length in range(len(data)):
        refused(data[:length])
    refused(data + b"\0")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped))


def forged(frame, streams=None, **changes):
    """Return a frame that a hostile writer made: its checksum is right."""
    streams = frame.streams if streams is None else streams
    record = frame.frame._replace(streams=tuple(map(len, streams)), **changes)
    return EncodedFrame(record._replace(checksum=frame_checksum(record, streams)), streams)


def test_every_flipped_bit_under_a_right_checksum_is_refused_or_gives_the_right_result():
    """What the checksum does not see, the bounds and the digest of the result do."""
    old = weights(200)
    new = changed(old, 0.05, most=300)
    frame, expected = encode(old, new), new.tobytes()
    for number, stream in enumerate(frame.streams):
        for bit in range(8 * len(stream)):
            flipped = bytearray(stream)
            flipped[bit // 8] ^= 1 << bit % 8
            streams = (*frame.streams[:number], bytes(flipped), *frame.streams[number + 1 :])
            target = bytearray(old.tobytes())
            try:
                apply(target, EncodedFrame.from_bytes(forged(frame, streams).to_bytes()))
            except CorruptDataError:
                assert target == old.tobytes()
            else:
                assert target == expected


def bomb(size):
    """Return a zstd frame of `size` zeros."""
    import pyarrow as pa

    return pa.Codec("zstd").compress(bytes(size), asbytes=True)


def test_a_bomb_is_given_no_more_room_than_the_tile_has():
    old = weights(4000)
    frame = encode(old, changed(old, 0.02))
    target, before = old.copy(), old.copy()
    for number in (0, 2, 3):
        streams = list(frame.streams)
        streams[number] = bomb(1 << 28)[: len(streams[number]) or None]
        hostile = forged(frame, tuple(streams))
        with pytest.raises(CorruptDataError):
            apply(target, EncodedFrame.from_bytes(hostile.to_bytes()))
    wide = forged(encode(old, ~old), (bomb(1 << 28)[:4000], b"", b"", b""))
    with pytest.raises(CorruptDataError):
        apply(target, EncodedFrame.from_bytes(wide.to_bytes()))
    assert np.array_equal(target, before)


@pytest.mark.parametrize(
    "change",
    [
        {"length": TILE + 2}, {"length": 0}, {"length": 3}, {"width": 3}, {"width": 4}, {"method": 4}, {"method": 0},
        {"changed": 0}, {"changed": 1 << 31}, {"gaps": 0}, {"gaps": 1 << 31}, {"after": bytes(16)},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(change):
    old = weights(4000)
    frame = encode(old, changed(old, 0.02))
    target = old.copy()
    with pytest.raises(CorruptDataError):
        apply(target, EncodedFrame.from_bytes(forged(frame, **change).to_bytes()))
    assert np.array_equal(target, old)


def test_positions_beyond_the_tile_are_refused():
    old = np.zeros(16, np.uint16)
    new = old.copy()
    new[[3, 9]] = 1
    frame = encode(old, new)
    for gaps in (b"\x03\x0c", b"\x0f\x00", b"\xff\x03", b"\x03\xff"):
        with pytest.raises(CorruptDataError):
            apply(old, EncodedFrame.from_bytes(forged(frame, (gaps, *frame.streams[1:])).to_bytes()))
    assert not old.any()


def test_reserved_bits_are_zero():
    old = weights(100)
    data = bytearray(encode(old, changed(old, 0.1)).to_bytes())
    data[6] = 1
    with pytest.raises(CorruptDataError, match="reserved"):
        EncodedFrame.from_bytes(bytes(data))


def test_the_record_is_what_the_documentation_says():
    """Against a parser written from the table of docs/delta-format.md alone."""
    old = weights(1000)
    new = changed(old, 0.02)
    frame = encode(old, new, offset=4096, target=7)
    data = frame.to_bytes()
    assert RECORD.size == 80
    assert struct.unpack_from("<IBBH", data) == (7, 2, ULP_SORTED, 0)
    assert struct.unpack_from("<QII", data, 8) == (4096, 2000, np.count_nonzero(old != new))
    gaps, *streams, checksum = struct.unpack_from("<I4II", data, 24)
    assert sum(streams) == len(data) - 80
    assert gaps >= frame.frame.changed
    assert checksum == frame.frame.checksum
    import xxhash

    assert data[48:64] == xxhash.xxh3_128(old.tobytes()).digest()
    assert data[64:80] == xxhash.xxh3_128(new.tobytes()).digest()
    zeroed = data[:44] + bytes(4) + data[48:]
    assert checksum == xxhash.xxh32(zeroed).intdigest()
    assert data[:80] == encode_frame_record(frame.frame)


def test_folded_frames_are_one_frame_from_the_first_to_the_last():
    old = weights(20_000)
    middle = changed(old, 0.02, seed=2)
    new = changed(middle, 0.02, seed=3)
    new[:100] = old[:100]  # changed and changed back
    frames = [encode(old, middle), encode(middle, new)]
    folded = fold(old, frames)
    assert np.array_equal(applied(old, folded), new)
    assert folded.frame.stored < sum(frame.frame.stored for frame in frames)
    assert fold(old, [frames[0], encode(middle, old)]).frame.method == SAME
    with pytest.raises(CorruptDataError):
        fold(old, reversed(frames))
    with pytest.raises(CorruptDataError, match="two tiles"):
        fold(old, [frames[0], encode(middle, new, offset=8)])
    with pytest.raises(UsageError):
        fold(old, [])


@pytest.mark.parametrize(
    ("old", "new", "width"),
    [(b"", b"", 2), (b"ab", b"abcd", 2), (b"abc", b"abd", 2), (b"ab", b"cd", 3), (LONG, LONG, 2)],
)  # fmt: skip
def test_what_is_no_tile_is_refused(old, new, width):
    with pytest.raises(UsageError, match="no tile"):
        encode(old, new, width=width)


def test_a_read_only_target_and_a_strided_array_are_refused():
    old = weights(100)
    frame = encode(old, changed(old, 0.5))
    with pytest.raises(UsageError, match="read-only") as error:
        apply(old.tobytes(), frame)
    assert error.value.hint == "target = bytearray(target)"
    with pytest.raises(UsageError, match="no frame") as error:
        fold(old, [])
    assert error.value.hint == "fold(base, [encode(base, result)])"
    with pytest.raises(UsageError, match="contiguous"):
        encode(old[::2], old[::2])


@pytest.mark.fault("a patch that was applied half drifts until a restart")
def test_an_interrupted_apply_is_noticed_and_a_finished_one_is_not_applied_twice():
    old = weights(3000)
    new = changed(old, 0.05)
    frame = encode(old, new)
    half = old.copy()
    half[:1500] = new[:1500]
    with pytest.raises(CorruptDataError):
        apply(half, frame)
    done = new.copy()
    assert not apply(done, frame)
    assert np.array_equal(done, new)


def test_the_benchmark_measures_each_codec_and_ulp1_is_the_smallest(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import delta

    rows = {row["codec"]: row for row in delta.measured(*delta.trained(1e-6, 1 << 18), 1)}
    assert set(rows) == {"ulp1", "xor + zstd1", "coo", "full"}
    assert 0.005 < rows["ulp1"]["changed"] < 0.05
    assert rows["ulp1"]["ratio"] > 2 * rows["xor + zstd1"]["ratio"]
    assert rows["ulp1"]["ratio"] > 4 * rows["coo"]["ratio"]
