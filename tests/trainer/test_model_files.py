"""A model that cannot be loaded is refused before ranks are started and before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from support.cli import environment
from support.stand_ins import leave_model

from syncd.errors import ConfigError, StorageError
from trainer.cli.main import run
from trainer.config.load import load_config
from trainer.config.model_files import check_model

CONFIG = 78


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a job's file and returns its path."""

    def write(more=""):
        path = tmp_path / "file.toml"
        path.write_text(f'[job]\ndir = "job"\n[model]\npath = "model"\n{more}')
        return str(path)

    return write


def refused(file):
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(file))
    return f"{caught.value} | {caught.value.hint}"


def test_a_complete_model_is_accepted(write, tmp_path):
    leave_model(tmp_path / "model")
    check_model(load_config(write()))


def test_the_critic_s_model_is_checked_too(write, tmp_path):
    critic = '[algorithm]\nname = "ppo"\n[critic]\nenabled = true\npath = "critic"'
    leave_model(tmp_path / "model")
    assert "not a model directory" in (said := refused(write(critic)))
    assert f"critic.path is a directory: hf download ORG/MODEL --local-dir {tmp_path}/critic" in said
    leave_model(tmp_path / "critic")
    (tmp_path / "critic/tokenizer.json").unlink()
    check_model(load_config(write(critic)))
    (tmp_path / "critic/model.safetensors").unlink()
    assert "weights are missing: model.safetensors" in refused(write(critic))
    (tmp_path / "critic/model.safetensors.index.json").write_text("{}")
    assert "it has no table weight_map" in (said := refused(write(critic)))
    assert "critic.path is a directory: hf download" in said


def test_indexed_shards_are_accepted_and_a_missing_one_is_named(write, tmp_path):
    leave_model(tmp_path / "model", shards=["a", "b", "c"])
    check_model(load_config(write()))
    (tmp_path / "model/model-00002-of-00003.safetensors").unlink()
    assert "weights are missing: model-00002-of-00003.safetensors: " in refused(write())


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "not a model directory: No such file or directory"),
        ("model.safetensors", "weights are missing: model.safetensors (or model.safetensors.index.json"),
        ("tokenizer.json", "has no tokenizer, and explorers load it from the steps: tokenizer.json (or"),
    ],
)
def test_a_missing_file_is_named(write, tmp_path, lost, said):
    leave_model(tmp_path / "model")
    (tmp_path / "model" / lost).unlink()
    found = refused(write())
    assert said in found
    assert str(tmp_path / "model") in found
    assert "hf download" in found


def test_a_malformed_config_or_index_is_reported(write, tmp_path):
    leave_model(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{")
    assert "not a model directory" in refused(write())
    (tmp_path / "model/config.json").write_text("[]")
    assert "does not name one architecture" in refused(write())
    leave_model(tmp_path / "model", shards=["a"])
    (tmp_path / "model/model.safetensors").unlink()
    (tmp_path / "model/model.safetensors.index.json").write_text("{}")
    assert "not an index of weights" in refused(write())


def test_a_git_lfs_pointer_is_refused_as_weights(write, tmp_path):
    leave_model(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "a pointer of git-lfs: 43 bytes" in refused(write())


@pytest.mark.parametrize(
    "names", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"], ["qwen.tiktoken"]]
)
def test_any_kind_of_tokenizer_file_is_accepted(write, tmp_path, names):
    leave_model(tmp_path / "model", tokenizer=False)
    for name in names:
        (tmp_path / "model" / name).touch()
    check_model(load_config(write()))


SFT = '[algorithm]\nname = "sft"\n[data]\nsft_path = "rows.{kind}"\n'


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", [{"tokens": [1, 2], "prompt_length": 1}, {"prompt": "a", "response": "b"}])
def test_sft_needs_a_tokenizer_only_for_text_rows(write, tmp_path, kind, row):
    leave_model(tmp_path / "model", tokenizer=False)
    if kind == "jsonl":
        (tmp_path / "rows.jsonl").write_text(f"\n{json.dumps(row)}\n")
    else:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    file = write(SFT.format(kind=kind))
    if "tokens" in row:
        check_model(load_config(file))
    else:
        assert "are texts: tokenizer.json" in refused(file)


def test_a_missing_sft_file_is_a_storage_error(write, tmp_path):
    leave_model(tmp_path / "model", tokenizer=False)
    with pytest.raises(StorageError):
        check_model(load_config(write(SFT.format(kind="jsonl"))))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_sft_file_that_cannot_be_read_is_named(write, tmp_path, kind):
    pytest.importorskip("pyarrow")
    leave_model(tmp_path / "model")
    with pytest.raises(StorageError) as caught:
        check_model(load_config(write(SFT.format(kind=kind))))
    assert str(caught.value).endswith(f"{tmp_path}/rows.{kind}")


def test_an_sft_file_that_is_not_utf_8_is_refused_by_whoever_reads_its_rows(write, tmp_path):
    read_examples = pytest.importorskip("trainer.experience.sft").read_examples
    leave_model(tmp_path / "model", tokenizer=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes('{"prompt": "caf\u00e9", "response": "b"}\n'.encode("latin-1"))
    check_model(load_config(write(SFT.format(kind="jsonl"))))
    with pytest.raises(ConfigError, match="not an SFT data set"):
        read_examples(str(rows))


@pytest.mark.parametrize("name", ["text_config", "num_attention_heads", "num_key_value_heads", "hidden_size"])
def test_null_in_a_model_s_config_stands_for_what_transformers_takes(write, tmp_path, name):
    path = leave_model(tmp_path / "model") + "/config.json"
    document = json.loads((tmp_path / "model/config.json").read_text())
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"num_attention_heads": 4, "hidden_size": 32, **document, name: None}, file)
    check_model(load_config(write("[model.lora]\nrank = 4\n")))


def test_the_model_of_another_engine_is_not_checked(write):
    check_model(load_config(write('[engine]\nname = "other"\n')))


def test_a_model_in_the_hub_cache_is_suggested(write, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    leave_model(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    file = write()
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(file, ["--model.path", "org/name"]))
    assert caught.value.hint == f"the hub's cache has org/name: --model.path {snapshot}"
    check_model(load_config(file, ["--model.path", str(snapshot)]))


PROGRAM = """
import sys
from trainer.cli.main import run
code = run(sys.argv[1:])
heavy = {name.partition('.')[0] for name in sys.modules} & {"torch", "verl", "ray", "transformers"}
print(code, sorted(heavy))
"""


@pytest.mark.parametrize("verb", ["train", "stages"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_missing_model_is_reported_before_torch_is_imported(write, tmp_path, verb, dry):
    file = write('[[stages]]\nname = "a"\n' if verb == "stages" else "")
    command = [sys.executable, "-c", PROGRAM, verb, file, *dry]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, env=environment()
    )
    assert ended.stdout.splitlines()[-1] == f"{CONFIG} []"
    assert f"error: not a model directory: No such file or directory: {tmp_path}/model\n" in ended.stderr
    assert "hint: model.path is a directory: hf download" in ended.stderr
    assert os.listdir(tmp_path) == ["file.toml"]


def test_a_completed_stage_does_not_need_its_model(write, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    file = write('[[stages]]\nname = "a"\n')
    assert run(["stages", file]) == CONFIG
    (tmp_path / "job").mkdir()
    (tmp_path / "job/stages.json").write_text('{"done": ["a"], "models": {}}')
    assert run(["stages", file]) == 0


def test_an_adapter_that_is_not_there_is_a_fault_of_the_file(write, tmp_path):
    leave_model(tmp_path / "model")
    said = refused(write('[model.lora]\nrank = 8\nadapter = "nowhere"'))
    assert f"{tmp_path}/nowhere" in said
    assert "adapter_model.safetensors" in said


def test_adapters_wider_than_the_model_are_refused(write, tmp_path):
    leave_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    check_model(load_config(write("[model.lora]\nrank = 64")))
    assert "rank = 65 is more than the model's width, 64" in refused(write("[model.lora]\nrank = 65"))


def test_weights_that_end_before_their_last_tensor_are_refused(write, tmp_path):
    leave_model(tmp_path / "model")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model/model.safetensors").write_bytes(whole)
    check_model(load_config(write()))
    (tmp_path / "model/model.safetensors").write_bytes(whole[:-1])
    assert f"cut off or a pointer of git-lfs: {len(whole) - 1} bytes" in refused(write())


def test_an_index_without_its_table_is_reported_in_words(write, tmp_path):
    leave_model(tmp_path / "model", shards=["a"])
    (tmp_path / "model/model.safetensors.index.json").write_text("{}")
    assert "KeyError" not in refused(write())
