"""Hooks by name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_hook import FakeHook

from explorer_hooks.finding import open_hook, shown
from explorer_hooks.hook import HookOptions
from syncd.errors import ConfigError


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "installed"))
    importlib.invalidate_caches()


def test_an_installed_hook_is_found_and_given_its_options(monkeypatch):
    given = []
    monkeypatch.setattr(FakeHook, "from_options", classmethod(lambda cls, options: given.append(options)))
    open_hook("fake=http://h:1/a=b", argv=("x",), settings={"k": "v"}, timeout=3.0, token="t")
    assert given == [HookOptions("http://h:1/a=b", ("x",), {"k": "v"}, 3.0, "t")]
    assert "'t'" not in repr(given[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fak=1", "did you mean 'fake'"),
        ("zzz", "no hook 'zzz'"),
        ("broken", "cannot be imported"),
        ("lacks-library", "cannot be imported: libcudart"),
        ("no-hook", "not a hook"),
    ],
)
def test_an_unknown_or_broken_hook_is_refused_with_a_hint(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        open_hook(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("vllm=http://me:secret@host:8000/v1?token=secret", "vllm=http://host:8000"),
        ("webhook=https://hooks.example/T0/secret", "webhook=https://hooks.example"),
        ("command=./reload.sh --key secret", "command=./reload.sh"),
        ("command=./reload.sh --url http://me:secret@host/x", "command=./reload.sh"),
        ("command=./it's", "command"),
        ("callback=package.module:function", "callback=package.module:function"),
        ("transformers", "transformers"),
    ],
)
def test_a_displayed_hook_address_contains_no_secrets(text, public):
    assert shown(text) == public


def test_the_follow_command_imports_no_heavy_modules():
    code = "import sys, explorer_hooks.cli.follow; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "structlog", "rich"}.isdisjoint(done.stdout.split())
