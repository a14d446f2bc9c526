"""What an explorer on a tinker server needs before there is one."""

import json

import pytest

from explorer_hooks.parts.tinker.sampler import TinkerInference, end_tokens
from explorer_hooks.run.load import load_file
from syncd.errors import ConfigError

FILE = """
[job]
dir = "job"
[model]
path = "model"
[explorer]
tasks = "tasks.jsonl"
[explorer.engine]
kind = "tinker"
"""


def loaded(tmp_path, more=""):
    path = tmp_path / "grpo.toml"
    path.write_text(FILE + more)
    return load_file(str(path))


def test_a_tinker_server_needs_an_address(tmp_path):
    with pytest.raises(ConfigError, match=r'kind = "tinker" needs explorer\.engine\.address'):
        loaded(tmp_path)


def test_options_of_hooks_mean_nothing_to_it(tmp_path):
    with pytest.raises(ConfigError, match=r'explorer\.engine\.options has no effect with kind = "tinker"'):
        loaded(tmp_path, 'address = "http://127.0.0.1:1"\noptions = { probe = "false" }\n')


@pytest.mark.parametrize("variable", ["TINKER_API_KEY", "OWN_KEY"])
def test_the_api_key_comes_from_the_environment(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    given = "" if variable == "TINKER_API_KEY" else f'token_env = "{variable}"\n'
    file = loaded(tmp_path, f'address = "http://127.0.0.1:1"\n{given}')
    with pytest.raises(ConfigError, match=f"{variable} is not set"):
        TinkerInference(file)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, {2, 7}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_what_ends_a_text_is_read_from_the_model_directory(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(str(tmp_path)) == expected
