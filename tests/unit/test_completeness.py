"""What a step must hold before anybody may load it: one table, and the properties behind it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.digest import digest_bytes
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest, decode_manifest, encode_manifest, manifest_problem
from syncd.protocol.receipt import Changes, FileRecord
from syncd.protocol.writer import StepWriter


def record(name="actor/model.safetensors", tensors=1):
    return FileRecord(name, 8, digest_bytes(b"x" * 8), tensors)


def delta(changed, parent=3):
    return DeltaHeader(parent, "sha256:00", "gaps", changed, 9)


def manifest(*shards, kind="weights", **more):
    return Manifest(7, 1, "run", shards, kind=kind, **more)


COMPLETE = {
    "one shard": manifest(record()),
    "a rank without tensors beside one with some": manifest(record("actor/a", 0), record("actor/b", 2)),
    "an adapter": manifest(record("actor/adapter_model.safetensors"), kind="lora"),
    "a delta": manifest(record(), kind="delta", delta=delta(4)),
    "a delta in which nothing changed": manifest(kind="delta", delta=delta(0)),
    "a delta in which nothing changed, with a shard": manifest(
        record(tensors=0), kind="delta", delta=delta(0)
    ),
    "a payload elsewhere": manifest(kind="remote", uri="tinker://run/7"),
}

INCOMPLETE = {
    "no shards": (manifest(), "no shard"),
    "no shards, but files": (replace(manifest(), files=(record("actor/config.json", 0),)), "no shard"),
    "no tensors": (manifest(record(tensors=0)), "no tensor"),
    "no tensors in any of two": (manifest(record("actor/a", 0), record("actor/b", 0)), "no tensor"),
    "all shards outside actor/": (manifest(record("critic/model.safetensors")), "outside of actor/"),
    "a shard beside actor/": (manifest(record("actor.safetensors")), "outside of actor/"),
    "one of two shards outside": (manifest(record(), record("model.safetensors")), "outside of actor/"),
    "an empty adapter": (manifest(kind="lora"), "no shard"),
    "an adapter without tensors": (manifest(record(tensors=0), kind="lora"), "no tensor"),
    "a delta without what changed": (manifest(kind="delta", delta=delta(1)), "no shard"),
    "a delta with nothing in its shards": (
        manifest(record(tensors=0), kind="delta", delta=delta(1)),
        "no tensor",
    ),
    "a delta outside": (manifest(record("x"), kind="delta", delta=delta(0)), "outside of actor/"),
}


@pytest.mark.parametrize("case", COMPLETE)
def test_complete_manifests_have_no_problem(case):
    assert manifest_problem(COMPLETE[case]) == ""
    assert decode_manifest(encode_manifest(COMPLETE[case]), "manifest.json") == COMPLETE[case]


@pytest.mark.parametrize("case", INCOMPLETE)
def test_readers_refuse_incomplete_manifests(case):
    found, said = INCOMPLETE[case]
    assert said in manifest_problem(found)
    with pytest.raises(CorruptDataError, match=said):
        decode_manifest(encode_manifest(found), "manifest.json")


@pytest.mark.parametrize("case", [case for case in INCOMPLETE if "files" not in case])
def test_an_incomplete_step_cannot_be_sealed(tmp_path, case):
    found, said = INCOMPLETE[case]
    job = Job.at(tmp_path)
    writer = StepWriter(job, found.step, 1, "run")
    writer.begin()
    changes = found.delta and Changes(3, "sha256:00", "gaps", found.delta.changed, 9, (record(),))
    written = [writer.write(shard.name, b"x" * 8, shard.tensors) for shard in found.shards]
    writer.receipt(1, written, changes=changes)
    with pytest.raises(UsageError, match=said):
        writer.seal(kind=found.kind)
    assert not [entry.name for entry in job.disk.list(writer.path) if entry.name == "manifest.json"]


shards = st.builds(
    record,
    st.from_regex(r"(actor/)?[a-z]{1,4}(/[a-z]{1,4})?", fullmatch=True),
    st.integers(0, 3),
)


@settings(deadline=None)
@given(st.lists(shards, max_size=4), st.sampled_from(["weights", "lora"]))
def test_weights_are_complete_when_every_shard_is_loaded_and_one_holds_a_tensor(found, kind):
    expected = all(one.name.startswith("actor/") for one in found) and any(one.tensors for one in found)
    assert (manifest_problem(manifest(*found, kind=kind)) == "") == expected


@settings(deadline=None)
@given(st.lists(shards, max_size=4), shards)
def test_a_shard_outside_the_payload_makes_a_step_incomplete(found, more):
    outside = manifest(*found, record("elsewhere"))
    assert manifest_problem(outside)
    assert manifest_problem(replace(outside, shards=(*outside.shards, more)))


@settings(deadline=None)
@given(st.lists(shards, max_size=4), st.integers(0, 9))
def test_a_delta_may_be_empty_only_if_nothing_changed(found, changed):
    is_inside = all(one.name.startswith("actor/") for one in found)
    expected = is_inside and (changed == 0 or any(one.tensors for one in found))
    assert (manifest_problem(manifest(*found, kind="delta", delta=delta(changed))) == "") == expected


@settings(deadline=None)
@given(st.lists(shards, max_size=4))
def test_a_remote_step_is_complete_without_shards(found):
    assert manifest_problem(manifest(*found, kind="remote", uri="s3://bucket/7")) == ""
