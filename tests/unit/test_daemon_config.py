"""The [daemon] table: defaults, overrides, and errors that help."""

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.config import CHOICES, DaemonConfig, load, parse_size
from syncd.errors import ConfigError


def write(tmp_path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_an_empty_configuration_gives_the_defaults():
    assert load(None, {}) == DaemonConfig()


def test_overrides_take_precedence_over_the_file(tmp_path):
    path = write(tmp_path, '[job]\nname = "x"\n[daemon]\nkeep_last = 4\nmax_bytes = "2GiB"\npoll = 1\n')
    config = load(path, {"keep_last": 7, "keep_every": None})
    assert (config.keep_last, config.max_bytes, config.poll, config.keep_every) == (7, 2 << 30, 1.0, 0)


def test_tables_of_other_programs_are_ignored(tmp_path):
    assert load(write(tmp_path, "[trainer]\nanything = 1\n"), {}) == DaemonConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[daemon]\nkeep_lost = 2\n", "keep_lost"),
        ("[daemon]\nkeep_last = 0\n", "less than 1"),
        ("[daemon]\nkeep_last = true\n", "not of type int"),
        ('[daemon]\nkeep_last = "2"\n', "not of type int"),
        ("[daemon]\npoll = -1\n", "less than"),
        ("[daemon]\npoll = inf\n", "too large"),
        (f"[daemon]\npoll = 1{'0' * 400}\n", "not of type float"),
        (f"[daemon]\nkeep_last = 1{'0' * 400}\n", "too large"),
        (f"[daemon]\nmax_bytes = '1{'0' * 400}'\n", "too large"),
        (f"[daemon]\nmax_bytes = {'9' * 5000}\n", "digits"),
        ("[daemon]\npoll = nan\n", "less than"),
        ('[daemon]\nverify = "sometimes"\n', "not one of"),
        ("[daemon]\nmetrics_port = 70000\n", "not a port"),
        ('[daemon]\nmax_bytes = "many"\n', "not a size"),
        ("daemon = 3\n", "not a table"),
        ("[daemon\n", "not TOML"),
        ("\x00", "not TOML"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        load(write(tmp_path, text), {})


def test_an_unknown_key_is_refused_with_the_closest_valid_key(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[daemon]\nkeep_lst = 2\n"), {})
    assert caught.value.hint == "did you mean 'keep_last'?"


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load(str(path), {})


def test_a_missing_configuration_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "none.toml"), {})


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("1K", 1024), ("1.5KiB", 1536), ("2 GB", 2 << 30), ("1T", 1 << 40)]
)
def test_sizes_are_parsed_with_their_units(text, size):
    assert parse_size(text) == size


@given(st.text(max_size=20))
def test_any_text_parses_as_a_size_or_raises_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_size(text) >= 0


def test_every_documented_choice_is_accepted():
    for key, choices in CHOICES.items():
        for choice in choices:
            assert getattr(load(None, {key: choice}), key) == choice


def test_a_configuration_file_named_by_the_user_may_be_a_pipe():
    reading, writing = os.pipe()
    os.write(writing, b"[daemon]\nkeep_last = 7\n")
    os.close(writing)
    try:
        assert load(f"/proc/self/fd/{reading}", {}).keep_last == 7
    finally:
        os.close(reading)


def test_a_job_configuration_must_be_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load(f"{tmp_path}/config.toml", {}, kept=True)
