"""A step becomes a directory that loads by itself, whole or not at all."""

import json
import os
import resource
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from support.saving import config_of, load, new_job, tiny  # noqa: E402

from syncd.errors import (  # noqa: E402
    CorruptDataError,
    JobMissingError,
    NotReadyError,
    StorageError,
    TryAgainError,
    UsageError,
)
from syncd.protocol.writer import StepWriter  # noqa: E402
from syncd.publishing import FollowingDisk, read_export  # noqa: E402
from syncd.transports.delta.publish import publish_delta  # noqa: E402
from syncd.transports.files.export_walk import TensorSpec  # noqa: E402
from syncd.transports.files.step_saver import StepSaver  # noqa: E402
from trainer.export import export, run  # noqa: E402
from trainer.export.run import split  # noqa: E402

TOKENIZER = b'{"model": "characters"}'


@pytest.fixture
def job(tmp_path):
    """Return a job with step 7 of a small model, in bf16."""
    job = new_job(tmp_path / "job")
    config = json.loads(config_of(tiny())["config.json"]) | {"dtype": "bfloat16"}
    saver = StepSaver(job, 0, 1)
    beside = {"config.json": json.dumps(config).encode(), "tokenizer.json": TOKENIZER}
    saver.save(7, "a", tiny().state_dict().items(), beside)
    saver.close()
    return job


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "exports" / "model")


def loaded(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def content(path):
    with open(path, "rb") as file:
        return file.read()


def nothing_is_left(out):
    parent = os.path.dirname(out)
    return not os.path.exists(out) and not (os.path.exists(parent) and os.listdir(parent))


class TestStep:
    def test_an_exported_copy_has_the_same_bytes_and_survives_removal_of_the_job(self, job, out):
        before = load(job, 7)
        export(job.root, 7, out)
        names = set(os.listdir(out))
        assert names == {
            "config.json", "tokenizer.json",
            "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        }  # fmt: skip
        for name in names:
            copy, original = f"{out}/{name}", f"{job.step(7)}/actor/{name}"
            assert content(copy) == content(original)
            assert os.stat(copy).st_ino != os.stat(original).st_ino
        shutil.rmtree(job.root)
        model = loaded(out)
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_an_export_casts_floats_to_the_given_dtype(self, job, out, dtype):
        export(job.root, 7, out, dtype)
        model, wanted = loaded(out), getattr(torch, dtype)
        assert model.dtype == wanted
        for name, weight in load(job, 7).items():
            assert torch.equal(model.state_dict()[name], weight.to(wanted)), name
        assert content(f"{out}/tokenizer.json") == TOKENIZER

    def test_a_large_export_is_split_into_shards_with_an_index(self, job, out, monkeypatch):
        monkeypatch.setattr(run, "SHARD_LIMIT", 20_000)
        export(job.root, 7, out, "float32")
        shards = sorted(name for name in os.listdir(out) if name.endswith(".safetensors"))
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert len(shards) > 2
        index = json.loads(content(f"{out}/model.safetensors.index.json"))
        for shard in shards:
            found = load_file(f"{out}/{shard}")
            assert {name for name, where in index["weight_map"].items() if where == shard} == found.keys()
            assert sum(one.nbytes for one in found.values()) <= 20_000
        assert loaded(out).dtype == torch.float32

    def test_an_empty_output_directory_is_used(self, job, out):
        os.makedirs(out)
        export(job.root, 7, out)
        loaded(out)


class TestHuggingFaceDirectoryOfVerl:
    @pytest.mark.parametrize("place", ["actor/huggingface", "actor"])
    def test_a_step_written_by_save_pretrained_is_exported(self, tmp_path, out, place):
        directory = tmp_path / "job" / "global_step_2" / place
        tiny().save_pretrained(directory)
        (directory / "additional").mkdir()
        (directory / "additional" / "template.jinja").write_text("{{ messages }}")
        (directory / ".hidden").write_text("x")
        (directory / "link").symlink_to("/etc/hostname")
        export(str(tmp_path / "job"), 2, out)
        found = loaded(out).state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in tiny().state_dict().items())
        assert content(f"{out}/additional/template.jinja") == b"{{ messages }}"
        assert not {".hidden", "link"} & set(os.listdir(out))

    def test_a_tensor_in_two_files_is_refused(self, tmp_path, out):
        directory = tmp_path / "job" / "global_step_2" / "actor"
        tiny().save_pretrained(directory)
        save_file({"model.norm.weight": torch.ones(32)}, directory / "more.safetensors")
        with pytest.raises(CorruptDataError, match="two files"):
            export(str(tmp_path / "job"), 2, out)


class TestRefused:
    @pytest.mark.parametrize("kind", ["file", "directory"])
    def test_an_existing_output_is_never_replaced(self, job, tmp_path, kind):
        out = tmp_path / "mine"
        kept = out / "kept" if kind == "directory" else out
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("kept")
        with pytest.raises(UsageError, match="replace"):
            export(job.root, 7, str(out))
        assert kept.read_text() == "kept"

    def test_an_output_inside_the_step_is_refused(self, job):
        with pytest.raises(UsageError, match="cannot go into the step"):
            export(job.root, 7, f"{job.step(7)}/export")

    def test_an_unsupported_dtype_is_refused(self, job, out):
        with pytest.raises(UsageError, match="int8"):
            export(job.root, 7, out, "int8")

    def test_a_missing_step_is_refused_with_the_steps_that_exist(self, job, out):
        with pytest.raises(UsageError, match="no step 8") as caught:
            export(job.root, 8, out)
        assert "7" in caught.value.hint

    def test_a_missing_job_is_refused(self, tmp_path, out):
        with pytest.raises(JobMissingError):
            export(str(tmp_path / "none"), 7, out)

    def test_an_incomplete_step_is_refused(self, job, out):
        writer = StepWriter(job, 9, 2, "b")
        writer.begin()
        writer.write("actor/model-00001-of-00002.safetensors", b"half")
        with pytest.raises(NotReadyError, match="not complete"):
            export(job.root, 9, out)

    @pytest.mark.parametrize("dtype", [None, "float32"])
    def test_damaged_bytes_are_refused_and_leave_no_output(self, job, out, dtype):
        with open(f"{job.step(7)}/actor/model-00001-of-00001.safetensors", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\x01")
        with pytest.raises(CorruptDataError, match="digest"):
            export(job.root, 7, out, dtype)
        assert nothing_is_left(out)

    def test_a_missing_shard_is_refused(self, job, out):
        os.unlink(f"{job.step(7)}/actor/model-00001-of-00001.safetensors")
        with pytest.raises(CorruptDataError, match="missing"):
            export(job.root, 7, out)

    def test_weights_without_a_config_are_refused(self, tmp_path, out):
        job = new_job(tmp_path / "bare")
        saver = StepSaver(job, 0, 1)
        saver.save(1, "a", [("w", torch.ones(3))])
        saver.close()
        with pytest.raises(CorruptDataError, match=r"config\.json"):
            export(job.root, 1, out)

    @pytest.mark.parametrize("dtype", [None, "float32"])
    @pytest.mark.parametrize("gone", ["step", "shard"])
    def test_a_step_removed_during_the_export_leaves_no_output_and_hints_at_pin(
        self, job, out, monkeypatch, dtype, gone
    ):
        find = run.find_source

        def find_and_remove(*arguments, **options):
            found = find(*arguments, **options)
            shutil.rmtree(job.step(7)) if gone == "step" else os.unlink(shard)
            return found

        shard = f"{job.step(7)}/actor/model-00001-of-00001.safetensors"
        monkeypatch.setattr(run, "find_source", find_and_remove)
        with pytest.raises(TryAgainError, match="removed") as caught:
            export(job.root, 7, out, dtype)
        assert "syncd pin" in caught.value.hint
        assert nothing_is_left(out)

    def test_an_impossible_output_path_is_a_storage_error(self, job, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError):
            export(job.root, 7, str(tmp_path / "file" / "out"))

    @pytest.mark.parametrize("dtype", [None, "float32"])
    def test_a_full_disk_is_a_storage_error_and_leaves_no_output(self, job, out, dtype):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
        try:
            with pytest.raises(StorageError, match="File too large") as caught:
                export(job.root, 7, out, dtype)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.exit_code == 74
        assert nothing_is_left(out)


class TestSplit:
    def test_tensors_are_split_in_order_within_the_shard_limit(self):
        specs = [
            TensorSpec(str(number), "U8", (size,), size) for number, size in enumerate([4, 5, 1, 20, 3, 3, 4])
        ]
        groups = split(specs, 10)
        assert [[spec.size for spec in group] for group in groups] == [[4, 5, 1], [20], [3, 3, 4]]
        assert [spec for group in groups for spec in group] == specs


def test_a_float32_export_of_a_delta_reads_the_training_state(job, out, tmp_path):
    """A run that is stopped after a sync makes that very step its full checkpoint, however it is stored."""
    changed = tmp_path / "changed"
    shutil.copytree(f"{job.step(7)}/actor", changed, ignore=shutil.ignore_patterns(".*"))
    for step, parent in ((8, 7), (9, 8)):
        files = FollowingDisk()
        kind = publish_delta(job, step, files, read_export(files, str(changed)), parent).manifest.kind
    assert kind == "delta"
    (shard,) = changed.glob("*.safetensors")
    trained = {name: weight.float() + 2**-20 for name, weight in load_file(shard).items()}
    os.mkdir(f"{job.step(9)}/training")
    torch.save(trained, f"{job.step(9)}/training/model_world_size_1_rank_0.pt")
    with pytest.raises(NotReadyError, match="full checkpoint"):
        export(job.root, 9, out, "float32")
    open(f"{job.step(9)}/.full_checkpoint", "x", encoding="ascii").close()
    export(job.root, 9, out, "float32")
    made = loaded(out).state_dict()
    assert all(torch.equal(made[name], weight) for name, weight in trained.items())
    assert content(f"{out}/tokenizer.json") == TOKENIZER


def test_a_delta_of_a_trainers_step_is_exported_whole(job, out, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(f"{job.step(7)}/actor", changed, ignore=shutil.ignore_patterns(".*"))
    (shard,) = changed.glob("*.safetensors")
    weights = load_file(shard)
    name = max(weights, key=lambda one: weights[one].numel())
    kinds = []
    for step, parent in ((8, 7), (9, 8)):  # the trainer's header has another form than safetensors' own
        weights[name].view(-1)[step::70] *= 1.01
        save_file(weights, shard, metadata={"format": "pt"})
        files = FollowingDisk()
        kinds.append(publish_delta(job, step, files, read_export(files, str(changed)), parent).manifest.kind)
    assert kinds == ["weights", "delta"]
    export(job.root, 9, out)
    made = loaded(out).state_dict()
    assert all(torch.equal(made[key], weights[key].to(made[key].dtype)) for key in weights)
    assert content(f"{out}/{shard.name}") == content(shard)
    export(job.root, 9, f"{out}-wide", "float32")
    assert {tensor.dtype for tensor in load_file(f"{out}-wide/{shard.name}").values()} == {torch.float32}
    os.unlink(shard)
    shutil.rmtree(job.step(8))
    with pytest.raises(CorruptDataError, match="step 8, which does not exist"):
        export(job.root, 9, f"{out}-broken")
    assert sorted(os.listdir(os.path.dirname(out))) == ["model", "model-wide"]
