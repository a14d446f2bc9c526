"""Any directory of safetensors becomes a step."""

import os

import pytest
from support.jobs import shard_bytes, start, write_step
from support.publishing import publish_directory

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, missing_files, read_manifest
from syncd.protocol.version import read_version
from syncd.protocol.writer import StepWriter


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def export(tmp_path):
    source = tmp_path / "export"
    (source / "nested").mkdir(parents=True)
    (source / "model-00001-of-00002.safetensors").write_bytes(shard_bytes({"a": (3, 3)}))
    (source / "model-00002-of-00002.safetensors").write_bytes(shard_bytes({"b": (5,)}))
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    (source / "optimizer.bin").write_text("not carried")
    (source / ".hidden.json").write_text("{}")
    return source


def test_a_published_directory_becomes_a_step_and_a_version(job, export):
    manifest = publish_directory(job, 12, str(export))
    assert [record.tensors for record in manifest.shards] == [1, 1]
    assert {record.name for record in manifest.files} == {"actor/config.json", "actor/tokenizer.json"}
    found = read_manifest(job.disk, job.step(12))
    assert missing_files(job.disk, job.step(12), found) == []
    assert damaged_files(job.disk, job.step(12), found) == []
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    version = read_version(job)
    assert version is not None
    assert (version.step, version.kind) == (12, "weights")


def test_a_published_adapter_is_a_lora_step(job, tmp_path):
    source = tmp_path / "adapter"
    source.mkdir()
    (source / "adapter_model.safetensors").write_bytes(shard_bytes({"lora_A": (2, 2)}))
    (source / "adapter_config.json").write_text("{}")
    assert publish_directory(job, 1, str(source)).kind == "lora"


def test_a_damaged_file_is_refused_before_anything_is_written(job, export):
    os.truncate(export / "model-00002-of-00002.safetensors", 20)
    with pytest.raises(CorruptDataError):
        publish_directory(job, 1, str(export))
    assert os.listdir(job.root) == []


def test_publishing_a_sealed_step_again_is_refused(job, export):
    publish_directory(job, 1, str(export))
    with pytest.raises(UsageError, match="complete already"):
        publish_directory(job, 1, str(export))


def test_publishing_below_the_newest_step_needs_rewind(job, export):
    write_step(job, 9)
    with pytest.raises(UsageError, match="below the newest"):
        publish_directory(job, 3, str(export))
    assert publish_directory(job, 3, str(export), rewind=True).step == 3


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("x")])
def test_a_directory_without_weights_is_refused(job, tmp_path, make):
    make(tmp_path / "source")
    with pytest.raises(UsageError):
        publish_directory(job, 1, str(tmp_path / "source"))


@pytest.mark.fault("shards of another world size are picked up")
def test_files_of_a_crashed_save_are_not_in_the_published_step(job, export):
    """A stray shard of another world size would be loaded by an engine that takes the whole directory."""
    crashed = StepWriter(job, 4, 4, "crashed")
    crashed.begin()
    crashed.write("actor/model-00003-of-00004.safetensors", b"left")
    publish_directory(job, 4, str(export))
    names = sorted(os.listdir(f"{job.step(4)}/actor"))
    assert [name for name in names if name.endswith(".safetensors")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
