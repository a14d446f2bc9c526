"""The manifest: sealed, the same from whoever writes it, and what it says of the files beside it."""

import contextlib
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.errors import CorruptDataError
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import encode, seal
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import (
    KINDS,
    Manifest,
    damaged_files,
    decode_manifest,
    encode_manifest,
    from_receipts,
    missing_files,
    read_manifest,
)
from syncd.protocol.receipt import FileRecord, Receipt

NAMES = st.lists(
    st.from_regex(r"actor/[a-z]{1,5}(/[a-z]{1,5})?", fullmatch=True), unique=True, min_size=1, max_size=4
)
DIGESTS = st.binary(max_size=4).map(digest_bytes)


@st.composite
def manifests(draw) -> Manifest:
    names = draw(NAMES)
    records = [
        FileRecord(name, draw(st.integers(0, 99)), draw(DIGESTS), draw(st.integers(0, 9))) for name in names
    ]
    records[0] = records[0]._replace(tensors=draw(st.integers(1, 9)))
    cut = draw(st.integers(1, len(records)))
    kind = draw(st.sampled_from(KINDS))
    step = draw(st.integers(1, 10**15))
    header = DeltaHeader(draw(st.integers(0, step - 1)), "sha256:00", draw(st.text()), 1, 9)
    return Manifest(
        step,
        draw(st.integers(1, 9)),
        draw(st.text()),
        tuple(records[:cut]),
        tuple(records[cut:]),
        kind,
        header if kind == "delta" else None,
        "tinker://run/" + draw(st.from_regex(r"[!-~]*", fullmatch=True)) if kind == "remote" else None,
        draw(st.floats(0, 2e9)),
    )


@given(manifests())
def test_a_manifest_round_trips(manifest):
    found = decode_manifest(encode_manifest(manifest), "/a")
    assert found == manifest
    assert found.digest.startswith("sha256:")
    assert encode_manifest(found) == encode_manifest(manifest)
    assert found.parent == (manifest.delta.parent if manifest.delta else None)


@settings(max_examples=300)
@given(manifests(), st.data())
def test_a_torn_or_changed_manifest_is_refused(manifest, draw):
    data = encode_manifest(manifest)
    cut = draw.draw(st.integers(0, len(data) - 2))
    with pytest.raises(CorruptDataError):
        decode_manifest(data[:cut], "/a")
    at = draw.draw(st.integers(0, len(data) - 2))
    changed = bytes([draw.draw(st.integers(32, 126).filter(lambda code: code != data[at]))])
    damaged = data[:at] + changed + data[at + 1 :]
    with contextlib.suppress(CorruptDataError):
        assert decode_manifest(damaged, "/a") == manifest  # as in 1.0 and 1e0


@given(st.integers(1, 4), st.randoms())
def test_manifest_bytes_depend_on_the_receipts_only(world_size, random_: random.Random):
    receipts = [
        Receipt(7, "run", n, world_size, (FileRecord(f"actor/{n}", n, digest_bytes(b"")),), (), 10.0 + n)
        for n in range(1, world_size + 1)
    ]
    manifest = from_receipts(receipts)
    assert manifest.written_at == 10.0 + world_size
    assert manifest.size == sum(range(world_size + 1))
    assert encode_manifest(from_receipts(list(receipts))) == encode_manifest(manifest)


def test_two_writers_that_claim_one_file_are_refused():
    record = FileRecord("actor/config.json", 2, digest_bytes(b"{}"))
    shard = Receipt(7, "run", 1, 2, (record,))
    with pytest.raises(CorruptDataError, match="claim one file"):
        from_receipts([shard, Receipt(7, "run", 2, 2, (), (record,))])


BODY = json.loads(
    encode_manifest(Manifest(7, 1, "run", (FileRecord("actor/a", 3, digest_bytes(b"abc"), 1),)))
)


def sealed(**changes) -> bytes:
    body = {key: value for key, value in {**BODY, **changes}.items() if key != "digest"}
    return encode(seal(body))


def test_the_unchanged_sample_manifest_is_accepted():
    assert decode_manifest(sealed(), "/a").step == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "other"},
        {"step": -1},
        {"step": "7"},
        {"world_size": 0},
        {"attempt": None},
        {"shards": {}},
        {"shards": [1]},
        {"shards": BODY["shards"] * 2},
        {"files": [{**BODY["shards"][0], "name": "../x"}]},
        {"delta": []},
        {"delta": {"parent": -1}},
        {"uri": 1},
        {"written_at": "now"},
    ],
)
def test_sealed_manifests_with_invalid_fields_are_refused(changes):
    with pytest.raises(CorruptDataError):
        decode_manifest(sealed(**changes), "/a")


def test_a_manifest_with_a_missing_or_wrong_digest_is_refused():
    for digest in (None, "", "sha256:00", 5):
        with pytest.raises(CorruptDataError):
            decode_manifest(encode({**BODY, "digest": digest}), "/a")
    with pytest.raises(CorruptDataError):
        decode_manifest(encode({key: value for key, value in BODY.items() if key != "digest"}), "/a")


def test_nan_in_a_manifest_is_refused():
    text = encode({**BODY, "written_at": 0.0}).replace(b'"written_at":0.0', b'"written_at":NaN')
    with pytest.raises(CorruptDataError):
        decode_manifest(text, "/a")


@pytest.fixture
def step(tmp_path):
    """Return a step's directory with its files, and its manifest."""
    records = []
    for name, content in {"actor/a": b"abc", "actor/sub/b": b"", "notes": b"x" * 100}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        records.append(FileRecord(name, len(content), digest_bytes(content), len(content) // 3))
    manifest = Manifest(7, 1, "run", tuple(records[:1]), tuple(records[1:]))
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    return tmp_path, manifest


def test_a_complete_step_has_no_missing_or_damaged_files(step):
    path, manifest = step
    assert read_manifest(LocalDisk(), str(path)) == manifest
    assert missing_files(LocalDisk(), str(path), manifest) == []
    assert damaged_files(LocalDisk(), str(path), manifest) == []
    (path / "actor" / "more").write_bytes(b"a full checkpoint adds files")
    assert missing_files(LocalDisk(), str(path), manifest) == []


def test_reading_a_missing_manifest_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_manifest(LocalDisk(), str(tmp_path))


def test_missing_shorter_and_replaced_files_are_named(step):
    path, manifest = step
    (path / "actor" / "a").unlink()
    (path / "notes").write_bytes(b"x" * 99)
    (path / "actor" / "sub" / "b").unlink()
    (path / "actor" / "sub" / "b").mkdir()
    assert [line.split(":")[0] for line in missing_files(LocalDisk(), str(path), manifest)] == [
        "actor/a",
        "actor/sub/b",
        "notes",
    ]


def test_symbolic_links_do_not_count_as_files_or_directories(step):
    path, manifest = step
    (path / "notes").rename(path / "moved")
    (path / "notes").symlink_to("moved")
    assert missing_files(LocalDisk(), str(path), manifest) == ["notes: 5 bytes of 100"]
    (path / "actor").rename(path / "elsewhere")
    (path / "actor").symlink_to("elsewhere")
    assert "actor: not a directory" in missing_files(LocalDisk(), str(path), manifest)


def test_a_change_of_the_same_size_is_found_by_the_digest_only(step):
    path, manifest = step
    (path / "actor" / "a").write_bytes(b"abd")
    assert missing_files(LocalDisk(), str(path), manifest) == []
    assert damaged_files(LocalDisk(), str(path), manifest) == ["actor/a: content does not match its digest"]
    (path / "actor" / "a").unlink()
    assert damaged_files(LocalDisk(), str(path), manifest) == ["actor/a: missing"]


def test_manifests_are_compared_without_their_digest(step):
    manifest = step[1]
    assert replace(manifest, digest="sha256:00") == manifest


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "delta"},
        {"kind": "weights", "delta": DeltaHeader(3, "sha256:00", "gaps", 1, 9)},
        {"kind": "delta", "delta": DeltaHeader(12, "sha256:00", "gaps", 1, 9)},
        {"kind": "remote"},
        {"kind": "weights", "uri": "tinker://run/7"},
    ],
)
def test_a_manifest_that_contradicts_itself_is_corrupt(wrong):
    manifest = Manifest(12, 1, "run", (FileRecord("actor/a", 3, digest_bytes(b"abc"), 1),), **wrong)
    with pytest.raises(CorruptDataError, match=r"a step of kind|a delta of a later step"):
        decode_manifest(encode_manifest(manifest), "manifest.json")


@pytest.mark.parametrize("uri", ["tinker://run/7", "s3://bucket/a b", "file:/models/a", "/models/start"])
def test_a_remote_step_is_at_a_uri_or_an_absolute_path(uri):
    manifest = Manifest(12, 1, "run", (), kind="remote", uri=uri)
    assert decode_manifest(encode_manifest(manifest), "manifest.json").uri == uri


@pytest.mark.parametrize(
    "uri",
    ["--config=/tmp/evil", "-x", "", "weights/7", "7://a", "tinker://a\x1b[2J", "a:", "s:" + "x" * 4096],
)
def test_a_uri_that_looks_like_an_option_is_refused(uri):
    manifest = Manifest(12, 1, "run", (), kind="remote", uri=uri)
    with pytest.raises(CorruptDataError, match="payload"):
        decode_manifest(encode_manifest(manifest), "manifest.json")
