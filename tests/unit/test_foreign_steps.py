"""Steps of other trainers as they meet in practice: mixed, resumed, promoted, half written."""

import os

import pytest
from support.foreign_jobs import (
    ADAPTER_CONFIG,
    CONFIG,
    archive,
    distributed_metadata,
    examine,
    index,
    numbered,
    put,
    ranks,
    shards_below,
    tensors,
)

from syncd.config import DaemonConfig
from syncd.daemon.foreign import ForeignLayouts, weights
from syncd.daemon.plan import plan
from syncd.daemon.snapshot import Snapshot
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.step import StepState
from syncd.protocol.version import parse_marker

INDEX = "model.safetensors.index.json"


@pytest.fixture
def job(tmp_path):
    return Job(str(tmp_path))


class Job:
    """A job directory, written and looked at."""

    def __init__(self, root: str) -> None:
        self.root = root

    def put(self, directory: str, *parts: tuple[str, bytes]) -> "Job":
        for name, content in parts:
            put(f"{self.root}/{directory}/{name}", content)
        return self

    def make(self, directory: str) -> "Job":
        os.makedirs(f"{self.root}/{directory}", exist_ok=True)
        return self

    def look(self, directory: str):
        return examine(LocalDisk(), self.root, directory)


MODEL = ("actor/model.safetensors", tensors())
ADAPTER = ("actor/lora_adapter/adapter_model.safetensors", tensors(1, "lora_A"))
ADAPTER_SETTINGS = ("actor/lora_adapter/adapter_config.json", ADAPTER_CONFIG)


@pytest.mark.fault("shards of another world size are picked up")
def test_a_mix_of_world_sizes_is_damaged(job):
    step = job.put("global_step_1", *ranks("actor/", 2), *ranks("actor/", 4)).look("global_step_1")
    assert step.state is StepState.DAMAGED
    assert step.problem == "shards of world sizes 2 and 4 are mixed"
    assert step.expected is None
    step = job.put("global_step_2", *ranks("actor/", 2)[:1], *ranks("actor/", 1)).look("global_step_2")
    assert step.state is StepState.DAMAGED


def test_a_rank_beyond_its_world_size_is_damaged(job):
    job.put("global_step_1", *ranks("actor/", 2), ("actor/model_world_size_2_rank_2.pt", archive()))
    assert job.look("global_step_1").state is StepState.DAMAGED


def test_malformed_rank_names_are_not_counted(job):
    names = (
        "model_world_size_2_rank_01.pt",
        "model_world_size_02_rank_1.pt",
        "model_world_size_2_rank_1.pt.tmp",
    )
    job.put("global_step_1", *ranks("actor/", 2)[:1], *((f"actor/{name}", archive()) for name in names))
    step = job.look("global_step_1")
    assert (step.state, step.present, step.expected) == (StepState.FILLING, 1, 2)


def test_optimizer_shards_give_the_expected_number_of_model_shards(job):
    step = job.put("global_step_1", *ranks("actor/", 4, "optim")[:2]).look("global_step_1")
    assert (step.layout, step.state, step.present, step.expected) == ("verl-fsdp", StepState.FILLING, 0, 4)


def test_an_export_without_model_shards_is_complete(job):
    job.put("global_step_1", *ranks("actor/", 2, "optim"), ("actor/huggingface/model.safetensors", tensors()))
    step = job.look("global_step_1")
    assert (step.layout, step.state, step.payload) == (
        "verl-huggingface",
        StepState.COMPLETE,
        "global_step_1/actor/huggingface",
    )


def test_an_export_beside_complete_shards_does_not_change_the_step(job):
    """It may be left from an earlier save of the step, and arrives when the step is published already."""
    before = job.put("global_step_1", *ranks("actor/", 2)).look("global_step_1")
    job.put(
        "global_step_1", *shards_below("actor/huggingface/", 2), ("actor/huggingface/config.json", CONFIG)
    )
    assert job.look("global_step_1") == before


def test_a_synced_step_that_is_then_saved_keeps_its_fingerprint(job):
    before = job.put("global_step_1", MODEL).look("global_step_1")
    job.put("global_step_1", (".full_checkpoint", b""), *ranks("actor/", 2), *ranks("actor/", 2, "optim"))
    after = job.look("global_step_1")
    assert (after.layout, after.digest, after.full) == ("trinity-0.6", before.digest, True)


def test_a_temporary_stream_file_is_filling(job):
    step = job.put("global_step_1", ("actor/model.safetensors.tmp", tensors())).look("global_step_1")
    assert (step.layout, step.state, step.present, step.expected) == ("trinity-0.6", StepState.FILLING, 0, 1)
    job.put("global_step_1", ADAPTER, ADAPTER_SETTINGS)
    assert job.look("global_step_1").state is StepState.FILLING


def test_a_stream_file_left_by_a_crash_does_not_hide_shards(job):
    job.put("global_step_1", ("actor/model.safetensors.tmp", tensors()), *ranks("actor/", 2))
    step = job.look("global_step_1")
    assert (step.layout, step.state) == ("verl-fsdp", StepState.COMPLETE)


@pytest.mark.fault("a failed adapter save is published all the same")
@pytest.mark.parametrize(
    "parts", [[MODEL], ranks("actor/", 2), [("actor/huggingface/model.safetensors", tensors())]]
)
def test_a_step_with_an_adapter_is_complete_only_with_the_whole_adapter(job, parts):
    job.put("global_step_1", *parts).make("global_step_1/actor/lora_adapter")
    assert job.look("global_step_1").state is StepState.FILLING
    job.put("global_step_1", ADAPTER)
    assert job.look("global_step_1").state is StepState.FILLING
    assert "adapter_config.json" in job.look("global_step_1").problem
    job.put("global_step_1", ADAPTER_SETTINGS)
    step = job.look("global_step_1")
    assert (step.state, step.kind, step.present, step.expected) == (
        StepState.COMPLETE,
        "weights",
        len(parts) + 1,
        len(parts) + 1,
    )
    job.put("global_step_1", (ADAPTER[0], ADAPTER[1][:-4]))
    assert job.look("global_step_1").state is StepState.FILLING


def test_a_step_with_common_state_is_filling_until_metadata_json_exists(job):
    data = {"__0_0.distcp": archive()}
    place = "actor/dist_ckpt"
    job.put(
        "global_step_1",
        (f"{place}/.metadata", distributed_metadata(data)),
        (f"{place}/__0_0.distcp", archive()),
    )
    assert job.look("global_step_1").state is StepState.COMPLETE
    job.put("global_step_1", (f"{place}/common.pt", archive()))
    step = job.look("global_step_1")
    assert step.state is StepState.FILLING
    assert "metadata.json" in step.problem


def test_optimizer_state_without_an_export_is_filling(job):
    """With a bridge Megatron keeps the weights in its export, and distributes the optimizer's state only."""
    data = {"__0_0.distcp": archive()}
    job.put("global_step_1", ("actor/dist_ckpt/.metadata", distributed_metadata(data)))
    job.put("global_step_1", ("actor/dist_ckpt/__0_0.distcp", archive()))
    job.put("global_step_1", *shards_below("actor/huggingface/", 2)[:1])
    step = job.look("global_step_1")
    assert (step.state, step.payload) == (StepState.FILLING, "global_step_1/actor/huggingface")


def test_a_megatron_adapter_is_complete_with_its_configuration(job):
    place = "actor/model/huggingface/adapter"
    job.put("global_step_1", (f"{place}/adapter_model.safetensors", tensors()))
    assert job.look("global_step_1").state is StepState.FILLING
    job.put("global_step_1", (f"{place}/adapter_config.json", ADAPTER_CONFIG))
    step = job.look("global_step_1")
    assert (step.layout, step.kind, step.payload) == ("verl-megatron", "lora", f"global_step_1/{place}")


def test_unknown_directories_match_no_layout(job):
    for number, name in enumerate(
        ("critic/model.safetensors", "data.pt", "actor/notes.txt", "model/weights.bin")
    ):
        assert job.put(f"global_step_{number}", (name, b"x")).look(f"global_step_{number}") is None
    assert job.put("step_1", ("trainer/.metadata", b"x")).look("step_1") is None
    assert job.put("checkpoint-1", ("trainer_state.json", b"{}")).look("checkpoint-1") is None


def test_a_tinker_step_is_filling_until_its_path_is_written(job):
    job.put(
        "global_step_1", ("remote_checkpoint_path.txt", b"tinker://a/weights/b"), (".full_checkpoint", b"")
    )
    step = job.look("global_step_1")
    assert (step.layout, step.state, step.kind, step.full) == ("tinker", StepState.FILLING, "remote", True)
    job.put("global_step_1", ("remote_sampler_path.txt", b""))
    assert job.look("global_step_1").state is StepState.FILLING
    job.put("global_step_1", ("remote_sampler_path.txt", b"tinker://a/sampler_weights/b\n"))
    assert job.look("global_step_1").payload == "tinker://a/sampler_weights/b"


@pytest.mark.fault("the ready mark is visible before its data")
def test_a_ready_mark_without_weights_is_filling(job):
    step = job.put("step_1", ("STABLE", b"")).look("step_1")
    assert (step.state, step.problem.partition("; ")[2]) == (
        StepState.FILLING,
        "it is ready and holds no weights",
    )
    job.put("step_1", ("model.safetensors", tensors()[:-9]))
    assert job.look("step_1").state is StepState.FILLING


def test_temporary_rank_files_are_not_counted(job):
    step = job.put("step_1", ("tmp-rank0-00001-of-00002.safetensors", tensors())).look("step_1")
    assert (step.state, step.present, step.expected) == (StepState.FILLING, 0, None)


def test_an_export_is_filling_until_its_configuration_is_complete(job):
    job.put("checkpoint-1", ("model.safetensors", tensors()))
    assert job.look("checkpoint-1").state is StepState.FILLING
    job.put("checkpoint-1", ("config.json", CONFIG[:20]))
    assert job.look("checkpoint-1").state is StepState.FILLING
    job.put("checkpoint-1", ("config.json", CONFIG))
    assert job.look("checkpoint-1").state is StepState.COMPLETE


@pytest.mark.parametrize(
    "parts",
    [
        [("model.safetensors", tensors()), *shards_below("", 2)],
        [("model.safetensors", tensors()), (INDEX, index(["model.safetensors"]))],
        [*shards_below("", 2), *shards_below("", 3)],
    ],
)
def test_contradictory_shard_names_are_filling_and_reported_as_mixed(job, parts):
    step = job.put("checkpoint-1", ("config.json", CONFIG), *parts).look("checkpoint-1")
    assert step.state is StepState.FILLING
    assert "mixed" in step.problem


def test_the_index_selects_among_shards_of_two_saves(job):
    job.put("checkpoint-1", ("config.json", CONFIG), *shards_below("", 2), *shards_below("", 3))
    job.put("checkpoint-1", (INDEX, index(numbered(3))))
    step = job.look("checkpoint-1")
    assert (step.state, step.present, step.expected) == (StepState.COMPLETE, 3, 3)


def test_an_index_that_arrives_last_does_not_change_the_step(job):
    before = job.put("checkpoint-1", ("config.json", CONFIG), *shards_below("", 2)).look("checkpoint-1")
    assert before.state is StepState.COMPLETE
    job.put("checkpoint-1", (INDEX, index(numbered(2))[:30]))
    assert job.look("checkpoint-1").state is StepState.FILLING
    job.put("checkpoint-1", (INDEX, index(numbered(2))))
    assert job.look("checkpoint-1") == before


def test_an_index_that_names_a_file_outside_its_directory_is_damaged(job):
    put(f"{job.root}/secret", tensors())
    job.put("checkpoint-1", ("config.json", CONFIG), (INDEX, index(["../secret"])))
    step = job.look("checkpoint-1")
    assert step.state is StepState.DAMAGED
    assert "'../secret'" in step.problem


def test_a_shard_number_beyond_its_total_is_damaged(job):
    job.put("checkpoint-1", ("config.json", CONFIG), ("model-00003-of-00002.safetensors", tensors()))
    assert job.look("checkpoint-1").state is StepState.DAMAGED


def test_a_damaged_shard_is_named(job):
    job.put("checkpoint-1", ("config.json", CONFIG), *shards_below("", 3))
    job.put("checkpoint-1", ("model-00002-of-00003.safetensors", b"\x20" + bytes(7) + b"<html>" * 10))
    step = job.look("checkpoint-1")
    assert (step.state, step.present) == (StepState.DAMAGED, 2)
    assert step.problem.startswith("model-00002-of-00003.safetensors: ")


def test_the_number_of_examined_files_is_limited(job, monkeypatch):
    monkeypatch.setattr(weights, "FILES_LIMIT", 3)
    step = job.put("global_step_1", *ranks("", 5)).look("global_step_1")
    assert (step.state, step.present, step.expected) == (StepState.FILLING, 3, 5)


def test_a_foreign_step_is_published_only_when_the_marker_names_it(job):
    step = job.put("global_step_4", MODEL).look("global_step_4")
    for text, published in ((b"3", None), (b"4", "global_step_4/actor")):
        looked = Snapshot(steps={4: step}, marker=parse_marker(text), marker_stable_for=60.0)
        version = plan(looked, DaemonConfig()).publish
        assert (version.path if version else None) == published


def test_each_header_is_read_once_while_a_step_fills(job):
    """A step that fills costs one header for each shard that comes, not all of them again."""
    layouts, disk = ForeignLayouts(), _Counting()
    for name, content in shards_below("actor/", 8):
        job.put("global_step_1", (name, content))
        layouts.examine(disk, job.root, "global_step_1", 1)
    assert disk.headers == 8


class _Counting(LocalDisk):
    headers = 0

    def read_at(self, path, offset, length):
        self.headers += 1
        return super().read_at(path, offset, length)
