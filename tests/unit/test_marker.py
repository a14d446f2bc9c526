"""The marker: whatever it holds, reading it gives a step or a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryDisk

from syncd.protocol.layout import MAX_STEP
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import MISSING_MARKER, MarkerReading, parse_marker, read_marker, write_marker


@given(st.integers(0, MAX_STEP), st.sampled_from([b"", b"\n", b" ", b"\r\n", b"\t"]))
def test_a_marker_may_have_white_space_around_the_step(step, space):
    assert parse_marker(space + str(step).encode() + space) == MarkerReading(step, str(step))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"-5", "negative"),
        (b"-", "not a number"),
        (b"--5", "not a number"),
        (b"+5", "not a number"),
        (b"5.0", "not a number"),
        (b"1e3", "not a number"),
        (b"1_000", "not a number"),
        (b"0x10", "not a number"),
        (b"1 2", "not a number"),
        (b"12\n13", "not a number"),
        (b"5\0", "not a number"),
        (b"\xef\xbb\xbf5", "not a number"),
        ("٣".encode(), "not a number"),
        (b"\xb2", "not a number"),
        (b"nan", "not a number"),
        (str(MAX_STEP + 1).encode(), "out of range"),
        (b"9" * 4000, "out of range"),
    ],
)
def test_invalid_markers_are_read_with_their_problem(data, problem):
    reading = parse_marker(data)
    assert (reading.step, reading.problem) == (None, problem)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_step_or_a_problem(data):
    reading = parse_marker(data)
    assert (reading.step is None) == bool(reading.problem)
    assert reading.step is None or (0 <= reading.step <= MAX_STEP and int(data) == reading.step)
    assert reading.text.isascii()
    assert reading.text.isprintable()
    assert len(reading.text) <= 400


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_markers_that_differ_in_white_space_read_the_same(one, other):
    if one.strip(b" \t\r\n") == other.strip(b" \t\r\n"):
        assert parse_marker(one) == parse_marker(other)


def test_missing_huge_and_special_markers_are_read_with_a_problem(tmp_path):
    assert read_marker(MemoryDisk(), "/m") == MISSING_MARKER
    assert read_marker(MemoryDisk({"/m": b"1" * 5000}), "/m").problem
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("link", "."):
        assert read_marker(LocalDisk(), f"{tmp_path}/{name}").problem == "not a regular file"
    assert read_marker(LocalDisk(), f"{tmp_path}/none/m") == MISSING_MARKER


def test_a_marker_is_written_as_a_plain_number(tmp_path):
    path = f"{tmp_path}/m"
    for step in (120, 7):
        write_marker(LocalDisk(), path, step)
        assert (tmp_path / "m").read_bytes() == str(step).encode()
        assert read_marker(LocalDisk(), path) == MarkerReading(step, str(step))


def test_a_file_system_error_is_raised_when_reading_a_marker():
    class Failing(MemoryDisk):
        def read(self, path, limit=0):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        read_marker(Failing(), "/m")
