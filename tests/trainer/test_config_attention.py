"""Flash attention and rows that ranks share: what they need is checked before ranks start."""

import json

import pytest
from support.job_file import LEAST

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from support.stand_ins import leave_model

from syncd.errors import ConfigError
from trainer.config.attention import require_groups
from trainer.config.load import load_config
from trainer.config.model_files import check_model

FLASH = ("--model.attn_implementation", "flash_attention_2")
SPLIT = (*FLASH, "--engine.packing", "true", "--engine.options.ulysses_sequence_parallel_size")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(LEAST)
    leave_model(tmp_path / "model")
    return str(path)


def refused(call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.exit_code == 78
    return f"{caught.value} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*FLASH, "--engine.compute_dtype", "float32"), 'engine.compute_dtype = "bfloat16"'),
        ((*SPLIT[2:], "2"), "needs flash attention, and model.attn_implementation is"),
        ((*FLASH, *SPLIT[4:], "2"), "engine.packing = true"),
        ((*SPLIT, "0"), "is not an accepted value"),
        ((*SPLIT, "two"), "is not an accepted value"),
        (("--algorithm.options.ulysses_sequence_parallel_size", "2"), "engine.options.ulysses_sequence_pa"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(file, arguments, said):
    assert said in refused(lambda: load_config(file, arguments))


def test_what_goes_together_is_accepted(file):
    load_config(file, FLASH)
    check_model(load_config(file, (*SPLIT, "2")))
    check_model(load_config(file, (*SPLIT, "1")))


@pytest.mark.parametrize(
    ("heads", "keys", "degree", "hint"),
    [(4, 2, 4, None), (4, 2, 3, "size = 2"), (12, 4, 8, "size = 4"), (6, 4, 6, "size = 2"), (3, 3, 2, "= 1")],
)
def test_heads_are_divided_among_the_ranks_that_share_a_row(file, tmp_path, heads, keys, degree, hint):
    path = tmp_path / "model" / "config.json"
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    config = load_config(file, (*SPLIT, str(degree)))
    if hint is None:
        check_model(config)
    else:
        assert hint in refused(lambda: check_model(config))


def test_ranks_are_divided_into_groups_that_share_rows(file):
    config = load_config(file, (*SPLIT, "4"))
    require_groups(config, 8)
    assert "start 8 ranks" in refused(lambda: require_groups(config, 6))
