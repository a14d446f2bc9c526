"""What two real ranks leave, by verl's checkpoint manager and by StepSaver, loads bit for bit as one model."""

import json
import os
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("safetensors", reason="needs safetensors")

from support.saving import KINDS_OF_SAVE, config_of, load, new_job, tiny, whole  # noqa: E402
from support.whole_jobs import run_ranks  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402

from syncd.errors import ConfigError, CorruptDataError, NotReadyError  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.transports.files.step_saver import StepSaver  # noqa: E402
from trainer.export import export  # noqa: E402
from trainer.export.fsdp import region_of  # noqa: E402

pytestmark = [pytest.mark.group("export of FSDP"), pytest.mark.slow]

HERE = os.path.dirname(os.path.abspath(__file__))
STEP = "global_step_3"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory in which two ranks have saved, each in a process of its own."""
    pytest.importorskip("verl", reason="needs verl")
    directory = tmp_path_factory.mktemp("fsdp")
    (directory / "steps").mkdir()
    (directory / "narrow").mkdir()
    codes, said = run_ranks(directory, 2, f"{HERE}/programs/fsdp_save.py", directory, kind="verl")
    assert codes == [0, 0], said
    return directory


@pytest.fixture
def foreign(saved, tmp_path):
    """Return a copy of verl's job of the model without tied weights."""
    shutil.copytree(saved / "apart", tmp_path / "foreign")
    return tmp_path / "foreign"


def loaded(directory):
    """Return the model of a directory as transformers loads it, and complain of weights it had to make up."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def assert_equal(model, expected, dtype):
    """Compare all weights, bit for bit."""
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], weight.to(dtype)), name


def names_in(directory):
    with open(f"{directory}/model.safetensors.index.json", encoding="utf-8") as file:
        return json.load(file)["weight_map"].keys()


class TestVerl:
    @pytest.mark.parametrize("tie", [False, True], ids=["apart", "tied"])
    @pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
    def test_a_verl_checkpoint_exports_as_one_model_with_the_right_ties(self, saved, tmp_path, tie, dtype):
        export(str(saved / ("tied" if tie else "apart")), 3, str(tmp_path / "out"), dtype)
        model = loaded(tmp_path / "out")
        assert_equal(model, tiny(tie), torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert ("lm_head.weight" in names_in(tmp_path / "out")) is not tie
        weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (weights[0].data_ptr() == weights[1].data_ptr()) is tie

    def test_a_float32_export_reads_the_training_state(self, saved, tmp_path):
        job = new_job(tmp_path / "job")
        checkpoint(job, saved)
        export(job.root, 3, str(tmp_path / "full"), "float32")
        assert_equal(loaded(tmp_path / "full"), tiny(), torch.float32)
        export(job.root, 3, str(tmp_path / "as-is"))
        assert_equal(loaded(tmp_path / "as-is"), tiny(), torch.bfloat16)

    def test_a_float32_export_of_a_step_without_full_checkpoint_is_refused(self, saved, tmp_path):
        job = new_job(tmp_path / "job")
        checkpoint(job, saved)
        os.unlink(f"{job.step(3)}/.full_checkpoint")
        with pytest.raises(NotReadyError, match="full checkpoint"):
            export(job.root, 3, str(tmp_path / "out"), "float32")

    def test_tied_tensors_saved_separately_are_tied_again(self, saved, tmp_path):
        job = shutil.copytree(saved / "tied", tmp_path / "job")
        for rank in range(2):
            change(job, rank, lambda found: {name: value.clone() for name, value in found.items()})
        export(str(job), 3, str(tmp_path / "out"))
        assert "lm_head.weight" not in names_in(tmp_path / "out")
        assert_equal(loaded(tmp_path / "out"), tiny(tie=True), torch.float32)


def checkpoint(job: Job, saved):
    """Make step 3 a full checkpoint: a step in bf16, with the training state that verl has written."""
    saver = StepSaver(job, 0, 1)
    saver.save(3, "only", tiny().state_dict().items(), config_of(tiny()))
    saver.close()
    shutil.copytree(saved / "apart" / STEP / "actor", f"{job.step(3)}/training")
    open(f"{job.step(3)}/.full_checkpoint", "x", encoding="ascii").close()


def change(job, rank, how):
    """Write what a rank has saved anew."""
    path = f"{job}/{STEP}/actor/model_world_size_2_rank_{rank}.pt"
    torch.save(how(torch.load(path, weights_only=True)), path)


class _Foreign:
    """An object that only its own code could load."""


class TestRefused:
    def test_a_missing_file_of_a_rank_is_refused(self, foreign, tmp_path):
        os.unlink(foreign / STEP / "actor" / "model_world_size_2_rank_1.pt")
        with pytest.raises(NotReadyError, match="1 of 2"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_a_truncated_file_of_a_rank_is_refused(self, foreign, tmp_path):
        os.truncate(foreign / STEP / "actor" / "model_world_size_2_rank_1.pt", 5000)
        with pytest.raises(CorruptDataError, match="not a complete file"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_files_of_two_world_sizes_are_refused(self, foreign, tmp_path):
        directory = foreign / STEP / "actor"
        shutil.copy(directory / "model_world_size_2_rank_1.pt", directory / "model_world_size_4_rank_1.pt")
        with pytest.raises(CorruptDataError, match="2, 4"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_files_of_ranks_with_different_tensors_are_refused(self, foreign, tmp_path):
        change(foreign, 1, lambda found: dict(list(found.items())[1:]))
        with pytest.raises(CorruptDataError, match="not those of rank 0"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_two_files_of_the_same_rank_are_refused(self, foreign, tmp_path):
        directory = foreign / STEP / "actor"
        shutil.copy(directory / "model_world_size_2_rank_0.pt", directory / "model_world_size_2_rank_1.pt")
        with pytest.raises(CorruptDataError, match="rank 1 has"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_lora_adapters_are_refused(self, foreign, tmp_path):
        for rank in range(2):
            change(foreign, rank, lambda found: {f"base.{name}.lora_A": one for name, one in found.items()})
        with pytest.raises(ConfigError, match="adapters"):
            export(str(foreign), 3, str(tmp_path / "out"))

    def test_a_file_that_would_run_code_is_refused(self, foreign, tmp_path):
        change(foreign, 1, lambda found: {**found, "extra": _Foreign()})
        with pytest.raises(ConfigError, match="running code") as caught:
            export(str(foreign), 3, str(tmp_path / "out"))
        assert "verl.model_merger" in caught.value.hint

    def test_buffers_that_differ_between_ranks_are_refused_and_leave_no_output(self, foreign, tmp_path):
        for rank in range(2):
            change(foreign, rank, lambda found, rank=rank: {**found, "buffer": torch.ones(3) * rank})
        with pytest.raises(CorruptDataError, match="'buffer'"):
            export(str(foreign), 3, str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


class TestSteps:
    @pytest.mark.parametrize("step", range(len(KINDS_OF_SAVE)))
    def test_an_fsdp_sharded_module_is_saved_whole(self, saved, step):
        job, (_, dtype) = Job.at(saved / "steps"), KINDS_OF_SAVE[step]
        assert load(job, step).keys() == tiny().state_dict().keys()
        path = f"{job.step(step)}/actor"
        assert_equal(loaded_as(path, dtype), tiny(), dtype)

    def test_the_last_saved_step_is_whole_with_tensors_from_both_ranks(self, saved):
        manifest = whole(Job.at(saved / "steps"), len(KINDS_OF_SAVE) - 1)
        assert [record.tensors > 0 for record in manifest.shards] == [True, True]

    def test_stream_and_background_mode_write_equal_tensors(self, saved):
        job = Job.at(saved / "steps")
        for step, twin in ((0, 2), (1, 3)):
            one, other = load(job, step), load(job, twin)
            assert all(torch.equal(one[name], other[name]) for name in one)

    def test_tensors_without_local_shards_are_not_taken_for_tied(self, saved):
        found = load(Job.at(saved / "narrow"), 0)
        assert found.keys() == {"one.weight", "one.bias", "other.weight", "other.bias", "tied.bias"}


def loaded_as(path, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


class TestRegion:
    """Where a rank's part belongs, against how torch itself cuts."""

    @pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9])
    def test_regions_of_uneven_shards_match_torch_chunk(self, rows):
        whole_one, mesh = torch.arange(rows * 2).reshape(rows, 2), torch.arange(4)
        pieces = list(whole_one.chunk(4)) if rows else []
        for rank in range(4):
            region = region_of((rows, 2), mesh, [Shard(0)], rank)
            expected = pieces[rank] if rank < len(pieces) else whole_one[:0]
            assert torch.equal(whole_one[region], expected)

    def test_replicas_of_a_shard_have_equal_regions(self):
        mesh = torch.arange(4).reshape(2, 2)
        found = [region_of((6, 4), mesh, [Replicate(), Shard(1)], rank) for rank in range(4)]
        assert found[0] == found[2] == (slice(0, 6), slice(0, 2))
        assert found[1] == found[3] == (slice(0, 6), slice(2, 4))

    def test_a_dimension_sharded_twice_has_nested_regions(self):
        mesh = torch.arange(4).reshape(2, 2)
        found = [region_of((7,), mesh, [Shard(0), Shard(0)], rank)[0] for rank in range(4)]
        assert found == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]

    def test_partial_sums_are_refused(self):
        with pytest.raises(ValueError, match="is not supported"):
            region_of((4,), torch.arange(2), [Partial()], 0)
