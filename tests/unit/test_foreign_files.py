"""What single files of other trainers are: whole, growing, or beyond repair; nothing is loaded."""

import json
import os
import pickle
import struct
import zipfile

import pytest
from support.foreign_jobs import archive, distributed_metadata, index, numbered, put, tensors

from syncd.daemon.foreign import whole_files
from syncd.daemon.foreign.directory import StepDirectory, Verdict, VerdictCache
from syncd.daemon.foreign.frameworks import whole_path
from syncd.daemon.foreign.whole_files import (
    whole_archive,
    whole_index,
    whole_metadata,
    whole_object,
    whole_tensors,
)
from syncd.errors import CorruptDataError
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.step import StepState

BROKEN = "broken"


@pytest.fixture
def verdict(tmp_path):
    """Return a function that says what a check makes of some bytes."""

    def check(function, content: bytes):
        path = f"{tmp_path}/file"
        put(path, content)
        try:
            return function(LocalDisk(), path, len(content)).state
        except CorruptDataError:
            return BROKEN

    return check


def header(document, data: bytes = b"", length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (header(TENSOR, b"12345678"), StepState.COMPLETE),
        (header(TENSOR, b"1234567"), StepState.FILLING),
        (header(TENSOR), StepState.FILLING),
        (header(TENSOR)[:20], StepState.FILLING),
        (b"", StepState.FILLING),
        (b"\x40\0\0", StepState.FILLING),
        (b"\0" * 500, StepState.FILLING),  # room left for a header that is written last
        (header(b'{"weight":' + b"\0" * 70, b"\0" * 8), StepState.FILLING),  # a hole in the header
        (header({}), StepState.FILLING),
        (header({"__metadata__": {"format": "pt"}}), StepState.FILLING),
        (header(TENSOR, b"123456789"), BROKEN),
        (header(b"<html>not found</html>", b"12345678"), BROKEN),
        (header(b'{"weight": {"dtype": "F32", "shape": [2]}}', b"12345678"), BROKEN),
        (header({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"1234"), BROKEN),
        (header(TENSOR, length=1 << 40), BROKEN),
        (b"version https://git-lfs.github.com/spec/v1\n", BROKEN),
    ],
)
def test_safetensors_files_are_classified_by_completeness(verdict, content, state):
    assert verdict(whole_tensors, content) == state


def test_a_growing_file_shows_its_progress(tmp_path):
    content = tensors()
    put(f"{tmp_path}/file", content[:-3])
    found = whole_tensors(LocalDisk(), f"{tmp_path}/file", len(content) - 3)
    assert found.problem == f"{len(content) - 3} of {len(content)} bytes"


@pytest.mark.parametrize("wide", [True, False])
def test_torch_archives_are_classified_by_completeness(verdict, wide):
    whole = archive(wide=wide)
    assert verdict(whole_archive, whole) == StepState.COMPLETE
    for length in range(len(whole)):
        assert verdict(whole_archive, whole[:length]) == StepState.FILLING
    assert verdict(whole_archive, whole[40:]) == BROKEN
    assert verdict(whole_archive, whole + whole) == BROKEN
    assert verdict(whole_archive, b"\0" * 1000) == StepState.FILLING


def test_torch_archives_with_contradictory_records_are_not_complete(verdict):
    whole = archive(wide=False)
    end = whole[-22:]
    assert verdict(whole_archive, whole[:-22] + end[:12] + struct.pack("<L", 1 << 31) + end[16:]) == BROKEN
    hole = bytearray(whole)
    start = struct.unpack("<L", end[16:20])[0]
    hole[start : start + 4] = b"\0\0\0\0"
    assert verdict(whole_archive, bytes(hole)) == StepState.FILLING
    hole[start : start + 4] = b"ABCD"
    assert verdict(whole_archive, bytes(hole)) == BROKEN


def test_files_that_torch_never_wrote_are_not_complete(verdict):
    assert verdict(whole_archive, pickle.dumps({"weight": 1})) == BROKEN
    assert (
        verdict(whole_archive, b"PK\x03\x04" + b"x" * 18 + b"PK\x05\x06" + b"\0" * 17 + b"\1")
        == StepState.FILLING
    )


def test_zip64_records_take_precedence_in_an_archive(verdict, tmp_path):
    """The numbers of the wide record count where there is one."""
    whole = bytearray(archive())
    whole[-14:-2] = b"\xff" * 12
    assert verdict(whole_archive, bytes(whole)) == StepState.COMPLETE
    assert zipfile.is_zipfile(f"{tmp_path}/file")


@pytest.mark.parametrize(
    ("document", "state"),
    [
        ({"weight_map": {"a": "x.safetensors"}}, StepState.COMPLETE),
        ({"weight_map": {}}, BROKEN),
        ({"weight_map": {"a": 1}}, BROKEN),
        ({"weight_map": ["x"]}, BROKEN),
        ({}, BROKEN),
        ([], BROKEN),
        (7, BROKEN),
        *(
            ({"weight_map": {"a": name}}, BROKEN)
            for name in (
                "../x",
                "/etc/passwd",
                "..",
                ".",
                "",
                "a/b",
                "a\nb",
                "a\0b",
                "\u202e",
                "x" * 256,
                "\ud800",
            )
        ),
    ],
)
def test_indexes_are_classified_by_completeness(verdict, document, state):
    assert verdict(whole_index, json.dumps(document).encode()) == state


def test_a_truncated_index_is_filling(verdict):
    whole = index(numbered(3))
    for length in range(len(whole)):
        assert verdict(whole_index, whole[:length]) == StepState.FILLING


def test_oversized_indexes_are_broken(verdict, monkeypatch):
    assert verdict(whole_index, b"[" * 100_000) == BROKEN
    assert verdict(whole_index, b'{"a":' * 65) == BROKEN
    monkeypatch.setattr(whole_files, "FILES_LIMIT", 3)
    assert verdict(whole_index, index(numbered(4))) == BROKEN
    monkeypatch.setattr(whole_files, "TENSOR_LIMIT", 3)
    assert verdict(whole_index, index("abc")) == BROKEN
    monkeypatch.setattr(whole_files, "INDEX_LIMIT", 10)
    assert verdict(whole_index, index("a")) == BROKEN


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"{}", StepState.COMPLETE),
        (b"", StepState.FILLING),
        (b'{"r": ', StepState.FILLING),
        (b"[]", BROKEN),
        (b"3", BROKEN),
    ],
)
def test_configurations_are_classified_by_completeness(verdict, content, state):
    assert verdict(whole_object, content) == state


def test_distributed_metadata_lists_each_file_with_its_length(tmp_path):
    files = {"__0_0.distcp": b"x" * 1234, "__0_1.distcp": b"x" * 100, "__12_0.distcp": b"x" * 7}
    put(f"{tmp_path}/file", distributed_metadata(files, pieces=5))
    found = whole_metadata(LocalDisk(), f"{tmp_path}/file", 0)
    assert found == Verdict(names={name: len(content) for name, content in files.items()})


def test_truncated_distributed_metadata_is_filling(verdict):
    whole = distributed_metadata({"__0_0.distcp": b"x" * 100}, pieces=40)
    assert verdict(whole_metadata, whole) == StepState.COMPLETE
    for length in range(len(whole)):
        assert verdict(whole_metadata, whole[:length]) == StepState.FILLING


class _Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_distributed_metadata_is_never_unpickled(verdict, tmp_path):
    trap = f"{tmp_path}/run"
    assert verdict(whole_metadata, pickle.dumps(_Payload(trap))) == StepState.FILLING
    assert not os.path.exists(trap)


def test_hostile_distributed_metadata_is_not_complete(verdict, monkeypatch):
    assert verdict(whole_metadata, pickle.dumps({}) + b"more") == StepState.FILLING
    assert verdict(whole_metadata, b"\x80\x04h\xff.") == StepState.FILLING
    outside = {"../../etc/passwd": b"x", "/x/__0_0.distcp": b"x", "__0_0.distcp/..": b"x"}
    assert verdict(whole_metadata, distributed_metadata(outside, pieces=1)) == StepState.FILLING
    whole = distributed_metadata({"__0_0.distcp": b"x", "__1_0.distcp": b"x"}, pieces=1)
    monkeypatch.setattr(whole_files, "FILES_LIMIT", 1)
    assert verdict(whole_metadata, whole) == BROKEN
    monkeypatch.setattr(whole_files, "OPERATION_LIMIT", 10)
    assert verdict(whole_metadata, whole) == BROKEN
    monkeypatch.setattr(whole_files, "METADATA_LIMIT", 10)
    assert verdict(whole_metadata, whole) == BROKEN


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"tinker://a-1/sampler_weights/x-5\n", StepState.COMPLETE),
        (b"", StepState.FILLING),
        (b"  \n", StepState.FILLING),
        (b"tink", StepState.FILLING),
        (b"tinker://", StepState.FILLING),
        (b"/etc/passwd", StepState.FILLING),
        (b"tinker://a b", StepState.FILLING),
        (b"tinker://a\ntinker://b", StepState.FILLING),
        (b"tinker://\xff\xfe", StepState.FILLING),
        (b"t" * 5000, BROKEN),
    ],
)
def test_remote_paths_are_classified_by_completeness(verdict, content, state):
    assert verdict(whole_path, content) == state


def test_the_verdict_cache_is_bounded_and_keeps_used_entries():
    cache = VerdictCache(limit=10)
    stat = LocalDisk().stat("/")
    for number in range(50):
        cache.put((whole_object, str(number), stat), Verdict())
        assert cache.get((whole_object, "0", stat))
    assert len(cache) == 10
    cache.put((whole_index, "index", stat), Verdict(names=dict.fromkeys("abcde", 0)))
    assert len(cache) == 5
    cache.put((whole_index, "index", stat), Verdict())
    assert len(cache) == 5
    cache.put((whole_index, "large", stat), Verdict(names=dict.fromkeys(map(str, range(11)), 0)))
    assert len(cache) == 0


def test_a_changed_file_is_read_again_despite_the_cache(tmp_path):
    cache = VerdictCache()
    put(f"{tmp_path}/model.safetensors", tensors()[:-1])
    assert (
        not StepDirectory(LocalDisk(), cache, str(tmp_path))
        .file("", "model.safetensors", whole_tensors)
        .is_whole
    )
    put(f"{tmp_path}/model.safetensors", tensors())
    assert (
        StepDirectory(LocalDisk(), cache, str(tmp_path)).file("", "model.safetensors", whole_tensors).is_whole
    )
