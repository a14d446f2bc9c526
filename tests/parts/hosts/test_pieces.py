"""How a step is divided, how a piece is proven, and who may write one."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deltas import SmallModel

import syncd.protocol.delta
from syncd.parts.hosts.pieces import (
    Part,
    Piece,
    PieceProof,
    made_tiles,
    plan_containers,
    plan_copy,
    stored_tiles,
)
from syncd.parts.hosts.pieces_in_work import PiecesInWork, SupersededError
from syncd.parts.hosts.shelf import LivePieces
from syncd.protocol.digest import digest_bytes
from syncd.protocol.layout import Job
from syncd.protocol.lineage import containers
from syncd.protocol.manifest import read_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.tile_table import decode_tiles, encode_tiles, read_tiles
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.publish import publish_delta
from syncd.transports.files.piece_reader import ByteSpan, PartialFile


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job with a step that is stored whole, and a delta of it."""
    monkeypatch.setattr(syncd.protocol.delta, "TILE", 8 << 10)
    (tmp_path / "job").mkdir()
    job, model = Job.at(tmp_path / "job"), SmallModel()
    publish_export(job, 1, FollowingDisk(), read_export(FollowingDisk(), model.export(tmp_path / "export1")))
    export = read_export(FollowingDisk(), model.train().export(tmp_path / "export2"))
    publish_delta(job, 2, FollowingDisk(), export, 1)
    return job


def records_of(manifest):
    records = (*manifest.whole_shards, *manifest.whole_files)
    return [record._replace(name=record.name.removeprefix("actor/")) for record in records]


def covered(plan):
    """Return whether pieces, and what each host reads itself, are every byte of every file, each once."""
    for number, file in enumerate(plan.files):
        spans = [(piece.offset, piece.length) for piece in plan.pieces if piece.file == number]
        spans += [(offset, length) for own, offset, length in plan.own if own == number]
        at = 0
        for offset, length in sorted(spans):
            if offset != at:
                return False
            at += length
        if at != file.size:
            return False
    return True


def proven(piece, data, cut=1000):
    proof = PieceProof(piece)
    for at in range(0, len(data), cut):
        proof.feed(memoryview(data)[at : at + cut])
    return proof.is_proven()


def read(plan, piece):
    with open(plan.files[piece.file].path, "rb") as file:
        file.seek(piece.offset)
        return file.read(piece.length)


def test_a_whole_step_is_divided_into_tiles_that_its_manifest_proves(job):
    manifest, directory = read_manifest(job.disk, job.step(1)), f"{job.step(1)}/actor"
    tiles = stored_tiles(job.disk, directory, manifest)
    plan = plan_copy(directory, records_of(manifest), tiles)
    assert covered(plan)
    assert max(piece.length for piece in plan.pieces) <= 8 << 10
    assert all(proven(piece, read(plan, piece)) for piece in plan.pieces)


def test_changes_say_the_tiles_of_the_version_that_they_make(job, tmp_path):
    manifest = read_manifest(job.disk, job.step(2))
    tiles = made_tiles(job, f"{job.step(2)}/actor", manifest)
    plan = plan_copy(str(tmp_path / "export2"), records_of(manifest), tiles)
    assert covered(plan)
    assert all(proven(piece, read(plan, piece)) for piece in plan.pieces)


def test_containers_are_divided_into_runs_of_frames(job, monkeypatch):
    monkeypatch.setattr("syncd.parts.hosts.pieces._RUN", 512)
    manifest = read_manifest(job.disk, job.step(2))
    plan = plan_containers(job.step(2), manifest.containers, containers(job, manifest))
    assert covered(plan)
    assert len(plan.pieces) > 2
    assert all(proven(piece, read(plan, piece)) for piece in plan.pieces)


@given(st.data())
def test_a_piece_with_any_other_byte_is_not_proven(data):
    content = data.draw(st.binary(min_size=2, max_size=300))
    cut = data.draw(st.integers(1, len(content) - 1))
    parts = tuple(
        Part(len(part), "xxh3_128", b"", digest_bytes(part).partition(":")[2])
        for part in (content[:cut], content[cut:])
    )
    piece, step = Piece(0, 0, len(content), parts), data.draw(st.integers(1, 400))
    assert proven(piece, content, step)
    at, flip = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    wrong = bytearray(content)
    wrong[at] ^= flip
    assert not proven(piece, bytes(wrong), step)
    assert not proven(piece, content[:-1], step)


@pytest.mark.parametrize("damage", ["digest", "place", "missing", "torn"])
def test_a_damaged_table_of_tiles_is_none(job, damage):
    (path,) = [
        f"{root}/{name}"
        for root, _, names in os.walk(job.step(1))
        for name in names
        if name.endswith(".tiles")
    ]
    with open(path, "rb") as file:
        tables = decode_tiles(file.read(), path)
    name = max(tables)
    changed = {
        "digest": {**tables, name: tables[name][:-1] + b"?"},
        "place": {**tables, name: tables[name][32:]},
        "missing": {other: table for other, table in tables.items() if other != name},
        "torn": tables,
    }[damage]
    with open(path, "wb") as file:
        file.write(encode_tiles(changed)[: -7 if damage == "torn" else None])
    assert read_tiles(job.disk, job.step(1), read_manifest(job.disk, job.step(1))) is None


def test_a_step_without_a_table_is_divided_into_files(job):
    manifest = read_manifest(job.disk, job.step(1))
    plan = plan_copy(f"{job.step(1)}/actor", records_of(manifest), None)
    assert covered(plan)
    assert len(plan.pieces) == len(plan.files)


@pytest.fixture
def work(tmp_path):
    content = b"right"
    record = FileRecord("f", len(content), digest_bytes(content))
    live = LivePieces(str(tmp_path), "copy", "xxh3_128:0123456789abcdef", str(tmp_path / "t"), ["f"], 1)
    (tmp_path / "t").mkdir()
    made = PiecesInWork(
        plan_copy("/nowhere", [record], None), str(tmp_path / "t"), live, lambda number: None, {}
    )
    yield made
    made.close()
    live.close()


@pytest.mark.parametrize(
    ("name", "content", "is_proven"),
    [("f", b"right", True), ("f", b"wrong", False), ("other", b"right", False)],
)
def test_only_what_is_planned_and_matches_is_taken_of_what_was_copied_early(
    tmp_path, name, content, is_proven
):
    early, target = tmp_path / "early", tmp_path / "t"
    early.write_bytes(content)
    target.mkdir()
    record = FileRecord("f", 5, digest_bytes(b"right"))
    live = LivePieces(str(tmp_path), "copy", "xxh3_128:0123456789abcdef", str(target), ["f"], 1)
    partial = {name: PartialFile(str(early), {ByteSpan(0, 5): digest_bytes(content)})}
    plan = plan_copy("/nowhere", [record], None)
    made = PiecesInWork(plan, str(target), live, lambda number: None, partial)
    assert made.has(0) is is_proven
    made.close()
    live.close()
    assert [path.name for path in target.iterdir()] == ["f"]
    if is_proven:
        assert (target / "f").read_bytes() == b"right"


def test_files_that_cannot_be_created_leave_no_descriptor_open(tmp_path):
    """A stage without room fails so at each version, for as long as it has none."""
    records = [FileRecord(name, 5, digest_bytes(b"right")) for name in ("a", "missing/b")]
    live = LivePieces(str(tmp_path), "copy", "xxh3_128:0123456789abcdef", str(tmp_path), ["a"], 2)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        PiecesInWork(plan_copy("/nowhere", records, None), str(tmp_path), live, lambda number: None, {})
    assert os.listdir("/proc/self/fd") == before
    live.close()


def test_the_attempt_that_claimed_a_piece_last_writes_it(work, tmp_path):
    late, new = work.claim(0), work.claim(0)
    with pytest.raises(SupersededError):
        late.write(memoryview(b"wrong"))
    new.write(memoryview(b"right"))
    assert new.finish()
    assert (tmp_path / "t" / "f").read_bytes() == b"right"


def test_nobody_changes_a_piece_that_is_proven(work, tmp_path):
    claim = work.claim(0)
    claim.write(memoryview(b"right"))
    assert claim.finish()
    with pytest.raises(SupersededError):
        work.claim(0)
    with pytest.raises(SupersededError):
        claim.write(memoryview(b"wrong"))
    assert (tmp_path / "t" / "f").read_bytes() == b"right"


def test_wrong_bytes_are_not_marked_as_proven(work):
    claim = work.claim(0)
    claim.write(memoryview(b"wrong"))
    assert not claim.finish()
    assert not work.has(0)


def test_nothing_is_written_once_all_is_over(work, tmp_path):
    claim = work.claim(0)
    work.close()
    with pytest.raises(SupersededError):
        claim.write(memoryview(b"right"))
    with pytest.raises(SupersededError):
        work.write_own(0, memoryview(b"right"), 0)
    assert (tmp_path / "t" / "f").read_bytes() == bytes(5)
