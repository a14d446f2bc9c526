"""Receipts: what a writer leaves, and when all writers of one attempt are done."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryDisk

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import Fields
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import (
    FileRecord,
    Receipt,
    read_receipt,
    read_receipts,
    receipts_directory,
    whole_attempt,
    write_receipt,
)

STEP = "/job/global_step_7"
RECORD = FileRecord("actor/model-00001-of-00002.safetensors", 3, digest_bytes(b"abc"), 1)
RECEIPT = Receipt(
    7, "run-1", 1, 2, (RECORD,), (FileRecord("actor/config.json", 2, digest_bytes(b"{}")),), 12.5
)


def path_of(writer: int, world_size: int) -> str:
    return f"{receipts_directory(STEP)}/{writer:05d}-of-{world_size:05d}.json"


def test_a_receipt_comes_back(tmp_path):
    disk, step = LocalDisk(), f"{tmp_path}/global_step_7"
    write_receipt(disk, step, RECEIPT)
    assert read_receipts(disk, step) == [RECEIPT]
    assert read_receipt(disk, f"{step}/actor/.receipts/00001-of-00002.json") == RECEIPT


def test_receipts_come_by_writer():
    disk = MemoryDisk()
    for writer in (3, 1, 2):
        write_receipt(disk, STEP, replace(RECEIPT, writer=writer, world_size=3))
    assert [receipt.writer for receipt in read_receipts(disk, STEP)] == [1, 2, 3]


def test_no_receipts_before_the_first():
    assert read_receipts(MemoryDisk(), STEP) == []


def test_what_cannot_be_read_does_not_count():
    disk = MemoryDisk()
    write_receipt(disk, STEP, RECEIPT)
    good = disk.files[path_of(1, 2)]
    disk.files[path_of(2, 2)] = good  # the first writer's, under the second one's name
    disk.files[path_of(1, 3)] = good[:-5]
    disk.files[f"{receipts_directory(STEP)}/notes.txt"] = b""
    disk.files[f"{receipts_directory(STEP)}/.00001-of-00002.json.abc.tmp"] = good
    assert read_receipts(disk, STEP) == [RECEIPT]
    with pytest.raises(CorruptDataError, match="another writer's name"):
        read_receipt(disk, path_of(2, 2))


def test_a_newer_receipt_says_what_to_upgrade_and_does_not_count():
    disk = MemoryDisk({path_of(1, 2): b'{"protocol":99}'})
    with pytest.raises(ProtocolTooNewError, match="upgrade syncd"):
        read_receipt(disk, path_of(1, 2))
    assert read_receipts(disk, STEP) == []


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"name": "/x"},
        {"name": ""},
        {"name": "x" * 300},
        {"digest": "md5:00"},
        {"digest": ""},
        {"size": -1},
        {"size": 1.0},
        {"tensors": None},
    ],
)
def test_records_that_are_refused(change):
    with pytest.raises(CorruptDataError):
        FileRecord.from_fields(Fields({**RECORD._asdict(), **change}, "/a"))


def test_one_name_twice_is_refused():
    disk = MemoryDisk()
    write_receipt(disk, STEP, replace(RECEIPT, shards=(RECORD, RECORD)))
    with pytest.raises(CorruptDataError, match="distinct names"):
        read_receipt(disk, path_of(1, 2))


@pytest.mark.parametrize("change", [{"writer": 0}, {"world_size": 0}, {"step": -1}])
def test_numbers_out_of_range_are_refused(change):
    disk = MemoryDisk()
    receipt = replace(RECEIPT, **change)
    write_receipt(disk, STEP, receipt)
    ((path, _),) = disk.files.items()
    with pytest.raises(CorruptDataError):
        read_receipt(disk, path)


def receipts(attempt: str, world_size: int, writers: list[int], at: float = 0.0) -> list[Receipt]:
    return [Receipt(7, attempt, writer, world_size, (), (), at) for writer in writers]


def test_an_attempt_is_whole_when_every_writer_is_done():
    assert whole_attempt([]) is None
    assert whole_attempt(receipts("a", 2, [1])) is None
    assert whole_attempt(receipts("a", 2, [2, 1])) == receipts("a", 2, [1, 2])
    assert whole_attempt(receipts("a", 2, [1, 3])) is None


def test_attempts_are_never_mixed():
    assert whole_attempt(receipts("a", 2, [1]) + receipts("b", 2, [2])) is None
    assert whole_attempt(receipts("a", 2, [1]) + receipts("a", 3, [2, 3])) is None


def test_of_two_whole_attempts_the_later_one_counts():
    early, late = receipts("a", 2, [1, 2], at=5.0), receipts("b", 1, [1], at=6.0)
    assert whole_attempt(early + late) == late
    assert whole_attempt(late + early) == late


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 4)), max_size=10))
def test_a_whole_attempt_is_whole(claims):
    found = whole_attempt([Receipt(7, attempt, writer, size, ()) for attempt, size, writer in claims])
    whole = [
        (attempt, size)
        for attempt, size in itertools.product("ab", (1, 2, 3))
        if all((attempt, size, writer) in claims for writer in range(1, size + 1))
        and not any(claim[:2] == (attempt, size) and claim[2] > size for claim in claims)
    ]
    assert (found is not None) == bool(whole)
    if found:
        assert [receipt.writer for receipt in found] == list(range(1, found[0].world_size + 1))
        assert len({(receipt.attempt, receipt.world_size) for receipt in found}) == 1
