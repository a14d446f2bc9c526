"""Probes: what is one, their bytes, what is refused, and how receipt, manifest, round and baseline carry them."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryDisk, memory_job

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.broadcast_round import Round, round_of
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import Fields, decode, encode, seal
from syncd.protocol.layout import Job
from syncd.protocol.manifest import decode_manifest, encode_manifest, from_receipts
from syncd.protocol.probe import (
    COMPUTE_DTYPES,
    EXPORT_DTYPES,
    MAX_TOKENS,
    Probe,
    encode_probe,
    probe_document,
    read_base_probe,
    read_probe,
    write_base_probe,
)
from syncd.protocol.receipt import FileRecord, Receipt, read_receipt, receipts_directory, write_receipt
from syncd.protocol.writer import StepWriter

STEP = "/job/global_step_7"
SHARD = FileRecord("actor/model-00001-of-00001.safetensors", 3, digest_bytes(b"abc"), 1)
CONFIG = FileRecord("actor/config.json", 2, digest_bytes(b"{}"))
RECEIPT = Receipt(7, "run-1", 1, 1, (SHARD,), (CONFIG,), 12.5)
PROBE = Probe(((5, 6, 7), (1, 0)), ((-0.5, -2.25), (-11.0,)), "float32", "bfloat16")
ROUND = Round(7, "run-1", 1, 2, "xxh3_128:0", 5.0, {"e0": 3})

WITHOUT = {
    "receipt": b'{"attempt":"run-1","files":[{"digest":"xxh3_128:dc7048f8f8747f561349cde127705c16","name":'
    b'"actor/config.json","size":2,"tensors":0}],"protocol":1,"shards":[{"digest":"xxh3_128:06b05ab6733a618578af5f94892f3950","name"'
    b':"actor/model-00001-of-00001.safetensors","size":3,"tensors":1}],"step":7,"world_size":1,"writer":1,'
    b'"written_at":12.5}\n',
    "manifest": b'{"attempt":"run-1","delta":null,"digest":'
    b'"sha256:e47fb6c2fae01df7e8211f7005a444932a2f94f06e4d0fc548c892d259baf1fa","files":[{"digest":'
    b'"xxh3_128:dc7048f8f8747f561349cde127705c16","name":"actor/config.json","size":2,"tensors":0}],"kind":"weights",'
    b'"protocol":1,"shards":[{"digest":"xxh3_128:06b05ab6733a618578af5f94892f3950","name":'
    b'"actor/model-00001-of-00001.safetensors","size":3,"tensors":1}],"step":7,"uri":null,"world_size":1,'
    b'"written_at":12.5}\n',
}
"""Bytes of a receipt and of its manifest as releases before probes wrote them."""


def receipt_bytes(receipt: Receipt) -> bytes:
    """Return the bytes of a receipt."""
    disk = MemoryDisk()
    write_receipt(disk, STEP, receipt)
    return next(iter(disk.files.values()))


@st.composite
def probes(draw) -> Probe:
    tokens = draw(st.lists(st.lists(st.integers(0, 2**31), min_size=2, max_size=5), min_size=1, max_size=4))
    values = st.floats(-1e6, 0)
    logprobs = [draw(st.lists(values, min_size=len(row) - 1, max_size=len(row) - 1)) for row in tokens]
    return Probe(
        tuple(map(tuple, tokens)),
        tuple(map(tuple, logprobs)),
        draw(st.sampled_from(COMPUTE_DTYPES)),
        draw(st.sampled_from(EXPORT_DTYPES)),
    )


@given(probes())
def test_a_probe_round_trips_through_json(probe):
    data = encode_probe(probe)
    found = Probe.from_fields(decode(data, "/a"))
    assert found == probe
    assert encode_probe(found) == data
    assert found.count == sum(len(row) - 1 for row in probe.tokens)


def test_the_bytes_of_a_probe():
    assert encode_probe(PROBE) == (
        b'{"compute_dtype":"float32",'
        b'"digest":"sha256:fc97b18eff6634a924d9fcbbdd9bac9d344d65c095778ffb41d02723724af1ae",'
        b'"export_dtype":"bfloat16","logprobs":[[-0.5,-2.25],[-11.0]],"protocol":1,"tokens":[[5,6,7],[1,0]]}\n'
    )


def test_log_probs_are_rounded_to_seven_digits_and_lists_become_tuples():
    probe = Probe([[1, 2], [3, 4]], [[-1.23456789012], [-1 / 3]], "float32", "keep")
    assert probe.logprobs == ((-1.234568,), (-0.3333333,))
    assert probe.tokens == ((1, 2), (3, 4))


def test_the_digest_is_of_the_tokens_alone():
    assert replace(PROBE, logprobs=((-1.0, -1.0), (-1.0,)), export_dtype="keep").digest == PROBE.digest
    assert replace(PROBE, tokens=((5, 6, 8), (1, 0))).digest != PROBE.digest
    # The same numbers, divided otherwise.
    assert Probe(((1, 2), (3, 4)), ((-1,), (-1,)), "float32", "keep").digest != (
        Probe(((1, 2, 3, 4),), ((-1, -1, -1),), "float32", "keep").digest
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": []},
        {"tokens": [[5]], "logprobs": [[]]},
        {"tokens": [[5, 6, 7]]},
        {"tokens": [[5, 6, -1], [1, 0]]},
        {"tokens": [[5, 6, True], [1, 0]]},
        {"tokens": [[5, 6, 7.0], [1, 0]]},
        {"tokens": [[5, 6, 2**53], [1, 0]]},
        {"tokens": ["abc", [1, 0]]},
        {"tokens": "abc"},
        {"tokens": None},
        {"logprobs": [[-0.5], [-11.0]]},
        {"logprobs": [[-0.5, -2.25]]},
        {"logprobs": [[-0.5, -2.25], [None]]},
        {"logprobs": [[-0.5, -2.25], [True]]},
        {"logprobs": [[-0.5, -2.25], ["-11"]]},
        {"logprobs": [[-0.5, -2.25], [-(10**400)]]},
        {"logprobs": [-0.5, -2.25]},
        {"compute_dtype": "keep"},
        {"compute_dtype": "float64"},
        {"compute_dtype": None},
        {"export_dtype": ""},
        {"digest": "sha256:00"},
        {"digest": None},
    ],
)
def test_what_is_no_probe_is_refused(change):
    document = json.loads(encode_probe(PROBE)) | change
    with pytest.raises(CorruptDataError):
        Probe.from_fields(Fields(document, "/a"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_refused(value):
    with pytest.raises(UsageError, match="finite"):
        replace(PROBE, logprobs=((-0.5, value), (-11.0,)))


def test_a_probe_has_a_limited_number_of_tokens():
    row = tuple(range(MAX_TOKENS))
    assert Probe((row,), ((-1.0,) * (MAX_TOKENS - 1),), "float32", "keep").count == MAX_TOKENS - 1
    with pytest.raises(UsageError, match="4096"):
        Probe((row, (1, 2)), ((-1.0,) * (MAX_TOKENS - 1), (-1.0,)), "float32", "keep")


def test_receipt_and_manifest_without_a_probe_keep_their_bytes():
    assert receipt_bytes(RECEIPT) == WITHOUT["receipt"]
    assert encode_manifest(from_receipts([RECEIPT])) == WITHOUT["manifest"]
    assert decode_manifest(WITHOUT["manifest"], "/a").probe is None


def test_a_receipt_round_trips_with_its_probe():
    disk, receipt = MemoryDisk(), replace(RECEIPT, probe=PROBE)
    write_receipt(disk, STEP, receipt)
    assert read_receipt(disk, f"{receipts_directory(STEP)}/00001-of-00001.json") == receipt


def test_the_manifest_has_the_probe_of_writer_1():
    other = replace(PROBE, logprobs=((-1.0, -1.0), (-1.0,)))
    first = replace(RECEIPT, world_size=2, probe=PROBE)
    second = replace(RECEIPT, writer=2, world_size=2, shards=(), files=(), probe=other)
    manifest = from_receipts([first, second])
    assert manifest.probe == PROBE
    assert decode_manifest(encode_manifest(manifest), "/a") == manifest
    assert from_receipts([replace(first, probe=None), second]).probe is None


def test_the_probe_lies_under_the_seal_of_the_manifest():
    document = json.loads(encode_manifest(from_receipts([replace(RECEIPT, probe=PROBE)])))
    document["probe"]["logprobs"][0][0] = -0.25
    with pytest.raises(CorruptDataError, match="own digest"):
        decode_manifest(encode(document), "/a")


def test_a_damaged_probe_makes_a_damaged_manifest():
    document = json.loads(encode_manifest(from_receipts([RECEIPT])))
    del document["digest"]
    damaged = seal(document | {"probe": probe_document(PROBE) | {"logprobs": []}})
    with pytest.raises(CorruptDataError, match="log-prob"):
        decode_manifest(encode(damaged), "/a")


def test_a_writer_gives_its_step_a_probe(tmp_path):
    job = Job.at(tmp_path)
    writer = StepWriter(job, 7, 1, "run-1")
    writer.begin()
    shard = writer.write("actor/model-00001-of-00001.safetensors", b"abc", 1)
    writer.receipt(1, [shard], probe=PROBE)
    assert writer.seal().probe == PROBE
    assert writer.sealed().probe == PROBE


def test_a_round_carries_a_probe_in_the_presence():
    carried = replace(ROUND, probe=PROBE)
    info = json.loads(encode({"info": {"round": carried.document()}}))["info"]
    assert round_of(info) == carried
    assert "probe" not in ROUND.document()
    assert round_of({"round": ROUND.document()}) == ROUND
    info["round"]["probe"]["digest"] = "sha256:00"
    assert round_of(info) is None


def test_the_baseline_is_recorded_once():
    job, other = memory_job(), replace(PROBE, logprobs=((-1.0, -1.0), (-1.0,)))
    assert read_base_probe(job) is None
    write_base_probe(job, PROBE, "/models/start")
    write_base_probe(job, other, "/models/other")
    assert read_base_probe(job) == PROBE
    assert job.base_probe == "/job/.syncd/base_probe.json"
    assert json.loads(job.disk.files[job.base_probe])["model"] == "/models/start"


def test_a_damaged_baseline_is_refused():
    job = memory_job({"/job/.syncd/base_probe.json": b"{}"})
    with pytest.raises(CorruptDataError, match="base_probe"):
        read_base_probe(job)
    with pytest.raises(FileNotFoundError):
        read_probe(job.disk, "/job/none.json")
