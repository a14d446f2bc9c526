"""The pages of the Python API: their examples run, and what they list is there."""

import importlib
import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from support.paths import ROOT

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("pyarrow", reason="experiences need pyarrow")

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
_EXAMPLE = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)
_LISTED = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
PUBLISH = [sys.executable, "-m", "syncd", "watch", "--once", "--no-prune", "--log-level", "error"]


def examples(page):
    """Return the code blocks of a page; options of listed names are no code."""
    text = _LISTED.sub("", page.read_text())
    return [textwrap.dedent(block) for block in _EXAMPLE.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run_one_after_the_other(page, tmp_path, monkeypatch):
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.chdir(ROOT)
    first = examples(ROOT / "docs" / "api" / "client.md")[0]  # it publishes the step that the others read
    exec(first.replace("/ckpt/job", str(job)), {})
    subprocess.run([*PUBLISH, job], check=True)
    found = examples(page)
    assert found, "a page without an example"
    for code in found:
        if code != first:
            exec(code.replace("/ckpt/job", str(job)), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_listed_member_exists(page):
    for dotted, options in _LISTED.findall(page.read_text()):
        place, _, name = dotted.rpartition(".")
        try:
            owner = importlib.import_module(dotted)
        except ModuleNotFoundError:
            owner = getattr(importlib.import_module(place), name)
        chosen = (yaml.safe_load(options) or {}).get("options", {})
        missing = [member for member in chosen.get("members", ()) if not hasattr(owner, member)]
        assert missing == [], dotted
