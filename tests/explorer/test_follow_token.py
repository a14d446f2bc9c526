"""Where `syncd follow` has its engine's token from."""

import importlib

import pytest

from syncd.errors import ConfigError, UsageError

SECRET = "s3cret"
follow = importlib.import_module("explorer_hooks.cli.follow")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)


def test_there_is_none_unless_given():
    assert follow._token(None, None) is None


def test_from_the_environment():
    assert follow._token("ENGINE_TOKEN", None) == SECRET


def test_from_a_file_without_its_line_end(tmp_path):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    assert follow._token(None, str(tmp_path / "token")) == SECRET


def test_systemd_s_credential_is_taken_where_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert follow._token(None, None) is None
    (tmp_path / "hook-token").write_text("other")
    assert follow._token(None, None) == "other"
    assert follow._token("ENGINE_TOKEN", None) == SECRET


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
def test_a_file_that_holds_none_is_named_and_never_shown(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        follow._token(None, str(path))
    assert raised.value.path == str(path)
    assert raised.value.hint == f"ls -l {path}"


def test_a_variable_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="NOWHERE"):
        follow._token("NOWHERE", None)


def test_both_are_one_too_many(tmp_path):
    with pytest.raises(UsageError, match="twice"):
        follow._token("ENGINE_TOKEN", str(tmp_path))
