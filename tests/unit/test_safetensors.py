"""Headers of safetensors files: what is read, and each thing that is refused, with its reason."""

import json
import struct
import time

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save, save_file

from syncd.errors import CorruptDataError
from syncd.protocol import safetensors as subject
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import (
    DTYPE_BITS,
    HEADER_LIMIT,
    RECORD_LIMIT,
    Tensor,
    parse_header,
    read_header,
    signature,
)

ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def file_of(header: object, data: bytes = b"", pad: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text + pad)) + text + pad + data


def parse(header: object, data: bytes = b"", pad: bytes = b""):
    whole = file_of(header, data, pad)
    return parse_header(whole, len(whole), "/job/shard")


def tensor(dtype="U8", shape=(1,), start=0, end=1, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end], **more}


def test_headers_written_by_the_library_are_read(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(4, dtype=np.int64),
        "empty": np.zeros((0, 5), dtype=np.float16),
        "scalar": np.array(7, dtype=np.uint8),
    }
    path = f"{tmp_path}/model.safetensors"
    save_file(arrays, path, metadata={"format": "pt", "ключ": "\n"})
    header = read_header(LocalDisk(), path)
    assert header.metadata == {"format": "pt", "ключ": "\n"}
    with open(path, "rb") as file:
        whole = file.read()
    assert header.size == len(whole)
    for name, array in arrays.items():
        found = header.tensors[name]
        content = whole[header.data_offset + found.start : header.data_offset + found.end]
        assert found.shape == array.shape
        assert content == array.tobytes()
    assert header.tensors["b"].dtype == "F32"


def test_tensors_are_listed_in_the_order_of_their_data():
    header = parse(
        {"b": tensor(start=1, end=2), "a": tensor(), "z": tensor(shape=[0], start=2, end=2)}, b"xy"
    )
    assert list(header.tensors) == ["a", "b", "z"]
    assert header.tensors["b"] == Tensor("b", "U8", (1,), 1, 2)


def test_a_file_without_tensors_is_accepted():
    header = parse({}, pad=b"      ")
    assert (header.tensors, header.metadata, header.data_offset, header.size) == ({}, {}, 16, 16)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_the_size_of_the_library(dtype):
    size = DTYPE_BITS[dtype]
    whole = file_of({"a": tensor(dtype, [8], 0, size)}, bytes(size))
    assert parse_header(whole, len(whole)).tensors["a"].dtype == dtype
    safetensors.deserialize(whole)


def test_all_dtypes_of_the_library_are_known():
    with pytest.raises(safetensors.SafetensorError) as raised:
        safetensors.deserialize(file_of({"a": tensor("NONE")}, b"x"))
    named = str(raised.value).split("expected one of")[1].split("`")[1::2]
    assert set(named) == set(DTYPE_BITS)


def test_any_json_white_space_and_field_order_is_accepted():
    text = b'{ "a" :\n{"data_offsets":\t[ 0,1 ] , "shape":[1],"dtype" :"U8"}\r\n,\n"b":'
    text += b'{"shape":[],"data_offsets":[1,2],"dtype":"I8"} } \n'
    assert [item.name for item in parse(text, b"xy").tensors.values()] == ["a", "b"]


def test_tensor_names_may_be_any_json_string():
    header = parse(rb'{"\ud83d\ude00{}\u0000":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    assert list(header.tensors) == ["😀{}\0"]


def test_a_prefix_that_holds_the_header_is_enough():
    whole = file_of({"a": tensor()}, b"x")
    assert parse_header(whole[:-1], len(whole)) == parse_header(whole, len(whole))


REFUSED = {
    "no file": (b"1234567", "too short"),
    "header beyond the file": (struct.pack("<Q", 3) + b"{}", "3 bytes in a file of 10"),
    "header over the limit": (struct.pack("<Q", HEADER_LIMIT + 1) + b"{}", "over 100000000"),
    "header of 2**64": (b"\xff" * 8 + b"{}", "over 100000000"),
    "no header": (bytes(8), "not a JSON object"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "not UTF-8"),
    "raw surrogate": (file_of(b'{"\xed\xa0\x80":1}'), "not UTF-8"),
    "white space first": (file_of(b" {}"), "at character 0"),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}"), "at character 0"),
    "a list": (file_of(b"[]"), "not a JSON object"),
    "not JSON": (file_of(b"{nonsense}"), "not a JSON object"),
    "unfinished": (file_of(b'{"a'), "a string that is not one"),
    "comma at the end": (file_of(b'{"__metadata__":{},}'), "not a JSON object"),
    "a second object": (file_of(b"{}{}"), "goes on after its end"),
    "zeros for padding": (file_of(b"{}", pad=b"\0"), "goes on after its end"),
    "half a surrogate pair": (file_of(rb'{"\ud800":{}}'), "a string that is not one"),
    "control character": (file_of(b'{"\x01":{}}'), "a string that is not one"),
    "a name twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2), b"x"), "'a' twice"),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' twice"),
    "a metadata name twice": (file_of(b'{"__metadata__":{"k":"","k":""}}'), "'k' twice"),
    "metadata of numbers": (file_of({"__metadata__": {"k": 1}}), "where a string must be"),
    "metadata of objects": (file_of({"__metadata__": {"k": {}}}), "where a string must be"),
    "metadata null": (file_of({"__metadata__": None}), "not a JSON object"),
    "metadata a list": (file_of({"__metadata__": ["k"]}), "not a JSON object"),
    "a tensor that is a number": (file_of({"a": 1}), "'a' is not described"),
    "a tensor that is a list": (file_of({"a": ["U8", [1], [0, 1]]}, b"x"), "'a' is not described"),
    "a field missing": (file_of({"a": {"dtype": "U8", "shape": [1]}}, b"x"), "'a' is not described"),
    "a field too many": (file_of({"a": {**ONE, "x": 1}}, b"x"), "'a' is not described"),
    "another field": (
        file_of({"a": {"dtype": "U8", "shape": [1], "offsets": [0, 1]}}, b"x"),
        "is not described",
    ),
    "a field twice": (
        file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "'a' is not described",
    ),
    "a field twice, one missing": (
        file_of(b'{"a":{"shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"x"),
        "'a' is not described",
    ),
    "deep": (file_of(b'{"a":' + b"[" * 100_000), "'a' is not described"),
    "deep in a field": (
        file_of(b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":%s}}' % (b"[" * 3000)),
        "'a'",
    ),
    "unknown dtype": (file_of({"a": tensor("F128")}, b"x"), "unknown dtype"),
    "dtype in another form": (file_of({"a": tensor(dtype=None)}, b"x"), "unknown dtype"),
    "dtype in lower case": (file_of({"a": tensor("u8")}, b"x"), "unknown dtype"),
    "negative length": (file_of({"a": tensor(shape=[-1])}, b"x"), "'a' is not described"),
    "negative offset": (file_of({"a": tensor(start=-1, end=0)}, b"x"), "'a' is not described"),
    "minus zero": (
        file_of(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "'a' is not described",
    ),
    "true for a length": (file_of({"a": tensor(shape=[True])}, b"x"), "not lists of integers"),
    "a float for a length": (file_of({"a": tensor(shape=[1.0])}, b"x"), "not lists of integers"),
    "no number for a length": (file_of({"a": tensor(shape=[float("nan")])}, b"x"), "not lists of integers"),
    "a list for a length": (file_of({"a": tensor(shape=[[1]])}, b"x"), "not lists of integers"),
    "text for a shape": (file_of({"a": {**ONE, "shape": "1"}}, b"x"), "not lists of integers"),
    "false for an offset": (file_of({"a": tensor(start=False)}, b"x"), "not lists of integers"),
    "a float for an offset": (file_of({"a": tensor(end=1.0)}, b"x"), "not lists of integers"),
    "three offsets": (file_of({"a": {**ONE, "data_offsets": [0, 1, 1]}}, b"x"), "'a' is not described"),
    "text for offsets": (file_of({"a": {**ONE, "data_offsets": "01"}}, b"x"), "not lists of integers"),
    "a number for offsets": (file_of({"a": {**ONE, "data_offsets": 1}}, b"x"), "'a' is not described"),
    "a leading zero": (
        file_of(b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', b"x"),
        "is not described",
    ),
    "an offset beyond the data": (file_of({"a": tensor(shape=[2], end=2)}, b"x"), "outside of the 1 bytes"),
    "offsets beyond the data": (file_of({"a": tensor(start=5, end=6)}, b"x"), "outside of the 1 bytes"),
    "an end before its start": (file_of({"a": tensor(start=1, end=0)}, b"x"), "outside of the 1 bytes"),
    "a huge offset": (file_of({"a": tensor(end=10**4000)}, b"x"), "outside of the 1 bytes"),
    "a huge length": (file_of({"a": tensor(shape=[10**4000])}, b"x"), "too large"),
    "a product beyond all bounds": (file_of({"a": tensor(shape=[2**32] * 8)}, b"x"), "too large"),
    "a product hidden by zero": (file_of({"a": tensor(shape=[2**32, 2**32, 0], end=0)}), "too large"),
    "too many dimensions": (file_of({"a": tensor(shape=[1] * RECORD_LIMIT)}, b"x"), "'a' is not described"),
    "too long for its shape": (
        file_of({"a": tensor(shape=[1], end=2)}, b"xy"),
        "takes 8 bits and is given 16",
    ),
    "too short for its shape": (file_of({"a": tensor("F32", [1])}, b"x"), "takes 32 bits and is given 8"),
    "half a byte": (file_of({"a": tensor("F4", [3])}, b"x"), "takes 12 bits and is given 8"),
    "half a byte more": (file_of({"a": tensor("F6_E2M3", [1])}, b"x"), "takes 6 bits and is given 8"),
    "overlap": (file_of({"a": tensor(shape=[2], end=2), "b": tensor(start=1, end=2)}, b"xy"), "'b' overlaps"),
    "the same place": (file_of({"a": tensor(), "b": tensor()}, b"x"), "overlaps"),
    "an empty one inside another": (
        file_of({"a": tensor(shape=[2], end=2), "b": tensor(shape=[0], start=1, end=1)}, b"xy"),
        "'b' overlaps",
    ),
    "a hole": (file_of({"a": tensor(), "b": tensor(start=2, end=3)}, b"xyz"), "'b' leaves a hole"),
    "a hole first": (file_of({"a": tensor(start=1, end=2)}, b"xy"), "'a' leaves a hole"),
    "bytes behind": (file_of({"a": tensor()}, b"xy"), "2 bytes of data where 1 are described"),
    "bytes behind nothing": (file_of({}, b"x"), "1 bytes of data where 0 are described"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_headers_are_refused_with_the_reason(case):
    data, reason = REFUSED[case]
    with pytest.raises(CorruptDataError, match=r"/job/shard$") as raised:
        parse_header(data, len(data), "/job/shard")
    assert reason in raised.value.message


def test_the_number_of_header_entries_is_limited(monkeypatch):
    monkeypatch.setattr(subject, "TENSOR_LIMIT", 2)
    monkeypatch.setattr(subject, "METADATA_LIMIT", 2)
    empty = tensor(shape=[0], end=0)
    assert len(parse({"a": empty, "b": empty, "__metadata__": {"a": "", "b": ""}}).tensors) == 2
    for header in (
        {"a": empty, "b": empty, "c": empty, "d": empty},
        {"__metadata__": dict.fromkeys("abc", "")},
    ):
        with pytest.raises(CorruptDataError, match="too many entries"):
            parse(header)


def test_a_truncated_header_is_refused():
    whole = file_of({"a": tensor()}, b"x")
    with pytest.raises(CorruptDataError, match="cut short: 20 bytes of"):
        parse_header(whole[:20], len(whole))


def test_a_file_with_missing_data_is_refused():
    whole = file_of({"a": tensor(shape=[4], end=4)}, b"xxxx")
    with pytest.raises(CorruptDataError, match="outside of the 3 bytes"):
        parse_header(whole, len(whole) - 1)


class CountingDisk(LocalDisk):
    def __init__(self):
        self.reads = []

    def read_at(self, path, offset, length):
        self.reads.append(length)
        return super().read_at(path, offset, length)


@pytest.mark.parametrize("count", [1, 3000])
def test_a_header_takes_one_or_two_reads(tmp_path, count):
    whole = file_of({f"layers.{n}.weight": tensor(start=n, end=n + 1) for n in range(count)}, bytes(count))
    (tmp_path / "a").write_bytes(whole)
    disk = CountingDisk()
    assert read_header(disk, f"{tmp_path}/a") == parse_header(whole, len(whole))
    assert disk.reads == [1 << 16] if count == 1 else len(disk.reads) == 2


def test_a_header_that_fills_the_first_read_is_accepted(tmp_path):
    whole = file_of({}, pad=b" " * ((1 << 16) - 10))
    (tmp_path / "a").write_bytes(whole)
    assert read_header(LocalDisk(), f"{tmp_path}/a").data_offset == 1 << 16


def test_a_header_length_beyond_the_file_causes_no_second_read(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack("<Q", HEADER_LIMIT) + bytes(1 << 17))
    disk = CountingDisk()
    with pytest.raises(CorruptDataError, match="in a file of"):
        read_header(disk, f"{tmp_path}/a")
    assert disk.reads == [1 << 16]


def test_a_file_that_shrinks_during_the_read_is_corrupt(tmp_path):
    whole = file_of({}, pad=b" " * (1 << 17))
    (tmp_path / "a").write_bytes(whole)

    class Shrinking(LocalDisk):
        def read_at(self, path, offset, length):
            return super().read_at(path, offset, length)[: 70_000 - offset]

    with pytest.raises(CorruptDataError, match="cut short"):
        read_header(Shrinking(), f"{tmp_path}/a")


def test_a_special_file_is_refused_and_a_missing_one_raises_not_found(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for name in (".", "link"):
        with pytest.raises(CorruptDataError):
            read_header(LocalDisk(), f"{tmp_path}/{name}")
    with pytest.raises(FileNotFoundError):
        read_header(LocalDisk(), f"{tmp_path}/none")


def test_the_signature_covers_all_shards():
    first = parse({"a": tensor("F16", [2], 0, 4)}, bytes(4))
    second = parse(
        {"b": tensor("F32", [1], 0, 4), "c": tensor()}.copy() | {"c": tensor(start=4, end=5)}, bytes(5)
    )
    whole = signature([first, second])
    assert whole == {"a": ("F16", (2,)), "b": ("F32", (1,)), "c": ("U8", (1,))}
    with pytest.raises(CorruptDataError, match="two shards hold tensor 'a'"):
        signature([first, first])


def test_header_parsing_time_is_not_quadratic_in_the_tensors(record_line):
    few, many = seconds_of_header(300), seconds_of_header(3000)
    record_line(f"safetensors header of 300 tensors: {few * 1000:.2f} ms, of 3000: {many * 1000:.2f} ms")
    assert many / few < 40, "ten times the tensors: a hundred times the work is quadratic"


def seconds_of_header(count):
    """Return the least seconds of a processor that a header takes."""
    whole = save({f"model.layers.{n}.weight": np.zeros((4, 4), np.float16) for n in range(count)})
    times = []
    for _ in range(10):
        started = time.process_time()
        parse_header(whole, len(whole))
        times.append(time.process_time() - started)
    return min(times)
