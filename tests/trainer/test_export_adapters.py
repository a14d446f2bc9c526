"""`trainer export` of adapters: merged as peft merges, or copied; only with the model that they belong to."""

import json
import os
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
peft = pytest.importorskip("peft", reason="adapters are compared with peft")
transformers = pytest.importorskip("transformers")

from support.saving import config_of, new_job, tiny  # noqa: E402

from syncd.errors import ConfigError, CorruptDataError, UsageError  # noqa: E402
from syncd.protocol.adapter_base import find_base  # noqa: E402
from syncd.transports.files.step_saver import StepSaver  # noqa: E402
from trainer.export import export  # noqa: E402


@pytest.fixture
def base(tmp_path):
    """Return the directory of a small model."""
    tiny().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return str(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path, base):
    """Return the directory of an adapter of it, as peft saves it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM")
    found = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    found.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


@pytest.fixture
def job(tmp_path, base, adapter):
    """Return a job whose step 4 is the adapter, in float32."""
    job = new_job(tmp_path / "job")
    publish(job, 4, base, adapter)
    return job


def publish(job, step, base, adapter):
    from safetensors.torch import load_file

    saver = StepSaver(job, 0, 1, dtype=None, base=find_base(job, base))
    with open(f"{adapter}/adapter_config.json", "rb") as file:
        beside = {"adapter_config.json": file.read()}
    saver.save(step, f"attempt-{step}", load_file(f"{adapter}/adapter_model.safetensors").items(), beside)
    saver.close()


def merged_by_peft(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_an_adapter_is_merged_as_peft_merges_it(job, base, adapter, tmp_path, dtype):
    out = str(tmp_path / "out")
    export(job.root, 4, out, dtype)
    found, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert str(found.dtype) == f"torch.{dtype or 'float32'}"
    wanted = merged_by_peft(base, adapter)
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor.float(), wanted[name], rtol=tolerance, atol=tolerance)
    assert "tokenizer.json" in os.listdir(out)


def test_an_adapter_alone_is_copied_as_it_is(job, adapter, tmp_path):
    out = tmp_path / "out"
    export(job.root, 4, str(out), adapter=True)
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors"]
    for name in os.listdir(out):
        with open(out / name, "rb") as copy, open(f"{job.step(4)}/actor/{name}", "rb") as step:
            assert copy.read() == step.read()
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 3


def test_a_base_that_was_moved_is_named_and_another_one_is_refused(job, base, tmp_path):
    moved = shutil.move(base, tmp_path / "moved")
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="does not exist") as caught:
        export(job.root, 4, out)
    assert "--base DIR" in caught.value.hint
    tiny(kind="llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="belongs to another model"):
        export(job.root, 4, out, base=str(tmp_path / "other"))
    assert not os.path.exists(out)
    export(job.root, 4, out, base=str(moved))
    assert os.path.exists(f"{out}/config.json")


def test_a_damaged_adapter_is_refused(job, tmp_path):
    path = f"{job.step(4)}/actor/adapter_model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    for adapter in (False, True):
        with pytest.raises(CorruptDataError, match="digest"):
            export(job.root, 4, str(tmp_path / "out"), adapter=adapter)


@pytest.mark.parametrize("field", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_what_is_more_than_a_and_b_is_refused(job, base, adapter, tmp_path, field):
    path = f"{adapter}/adapter_config.json"
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config | field, file)
    publish(job, 5, base, adapter)
    with pytest.raises(CorruptDataError, match="not supported"):
        export(job.root, 5, str(tmp_path / "out"))


def test_only_adapters_have_a_base_and_are_copied_alone(job, tmp_path):
    saver = StepSaver(job, 0, 1)
    saver.save(9, "whole", tiny().state_dict().items(), config_of(tiny()))
    saver.close()
    with pytest.raises(UsageError, match="holds no adapter: it is of kind weights"):
        export(job.root, 9, str(tmp_path / "out"), adapter=True)
    with pytest.raises(UsageError, match="no adapter, so no base"):
        export(job.root, 9, str(tmp_path / "out"), base=str(tmp_path / "base"))
    with pytest.raises(UsageError, match="copies the adapter as it is"):
        export(job.root, 4, str(tmp_path / "out"), "float32", adapter=True)
    with pytest.raises(UsageError, match="copies the adapter as it is"):
        export(job.root, 4, str(tmp_path / "out"), adapter=True, critic=True)
    with pytest.raises(UsageError, match="a critic has no adapter"):
        export(job.root, 4, str(tmp_path / "out"), base=str(tmp_path / "base"), critic=True)
