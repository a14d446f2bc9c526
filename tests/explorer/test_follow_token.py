"""Where `syncd follow` has its engine's token from."""

import importlib

import pytest

from explorer_hooks.run.served import api_key
from syncd.errors import ConfigError, UsageError

SECRET = "s3cret"
follow = importlib.import_module("explorer_hooks.cli.follow")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)


def test_there_is_no_token_by_default():
    assert follow._token(None, None) is None


def test_a_token_is_read_from_the_environment():
    assert follow._token("ENGINE_TOKEN", None) == SECRET


def test_a_token_is_read_from_the_environment_without_its_newline(monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", f"{SECRET}\n")
    assert follow._token("ENGINE_TOKEN", None) == api_key("ENGINE_TOKEN", "token_env") == SECRET


def test_a_token_is_read_from_a_file_without_its_newline(tmp_path):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    assert follow._token(None, str(tmp_path / "token")) == SECRET


def test_the_systemd_credential_is_used_if_no_token_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert follow._token(None, None) is None
    (tmp_path / "hook-token").write_text("other")
    assert follow._token(None, None) == "other"
    assert follow._token("ENGINE_TOKEN", None) == SECRET


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
def test_a_file_without_a_token_is_named_in_the_error(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        follow._token(None, str(path))
    assert raised.value.path == str(path)
    assert raised.value.hint == f"ls -l {path}"


def test_a_missing_token_variable_is_an_error():
    with pytest.raises(ConfigError, match="NOWHERE"):
        follow._token("NOWHERE", None)


def test_a_token_from_both_variable_and_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="twice"):
        follow._token("ENGINE_TOKEN", str(tmp_path))
