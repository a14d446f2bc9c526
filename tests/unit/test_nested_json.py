"""JSON of others that is nested more deeply than Python's stack: refused, or passed over, as text that is no JSON."""

import struct

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("pyarrow", reason="experiences are Parquet")
pytest.importorskip("torch", reason="an export is of tensors")

from syncd.cli.init import _has_tied_head
from syncd.client.state_dict import foreign_shards
from syncd.errors import SyncdError
from syncd.jobfile.stages_file import read_record
from syncd.protocol.adapter_base import weight_files
from syncd.protocol.local_disk import LocalDisk
from trainer.config.lora import read_adapter_config
from trainer.config.model_files import _check_weights, _has_tokens, read_model_config
from trainer.experience.sft import read_examples
from trainer.export.run import config_with_dtype
from trainer.sampling import _parsed

NESTED = "[" * 100_000
INDEX = "model.safetensors.index.json"

REFUSED = {
    "the record of stages": ("stages.json", read_record),
    "the index of a base": (INDEX, lambda directory: weight_files(LocalDisk(), directory)),
    "the index of a foreign step": (INDEX, lambda directory: foreign_shards(LocalDisk(), directory)),
    "the index of a start model": (INDEX, _check_weights),
    "a model's configuration": ("config.json", read_model_config),
    "an adapter's configuration": ("adapter_config.json", read_adapter_config),
    "an SFT data set": ("rows.jsonl", lambda directory: read_examples(f"{directory}/rows.jsonl")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_is_refused(tmp_path, kind):
    name, read = REFUSED[kind]
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(SyncdError):
        read(str(tmp_path))


def test_the_configuration_of_an_export_is_refused():
    with pytest.raises(SyncdError, match="not a JSON object"):
        config_with_dtype(NESTED.encode(), "config.json", "float32")


def test_a_header_that_says_nothing_is_left_to_the_engine_that_loads_the_model(tmp_path):
    header = NESTED.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    _check_weights(str(tmp_path))


def test_a_model_whose_configuration_says_nothing_has_no_tied_head(tmp_path):
    (tmp_path / "config.json").write_text(NESTED)
    assert not _has_tied_head(str(tmp_path))


def test_whoever_reads_a_data_set_says_what_is_wrong_with_its_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text(NESTED)
    assert _has_tokens(str(tmp_path / "rows.jsonl"))


def test_the_arguments_of_a_tool_call_stay_text():
    assert _parsed(NESTED, dict) == NESTED
