"""Links to the documentation in messages and `--help`: absolute, from one constant, to pages that exist."""

import ast
import configparser
import importlib.util
import re

import pytest
from support.doc_pages import anchors, message_links
from support.paths import ROOT

from syncd.console import CLOSED_PIPE, INTERRUPTED
from syncd.errors import REPOSITORY, SyncdError
from syncd.protocol.engine_state import EngineState
from syncd.protocol.mount import MountState
from syncd.protocol.step import StepState
from syncd.views.problem_groups import KINDS

SOURCES = [
    path for name in ("syncd", "trainer", "explorer_hooks") for path in sorted((ROOT / name).rglob("*.py"))
]


RECIPES = sorted(path for path in (ROOT / "syncd" / "recipes").iterdir() if path.is_file())
LINKED = sorted(set().union(*(message_links(path.read_text()) for path in [*SOURCES, *RECIPES])))


def messages(tree):
    """Yield the texts of a module that are not documentation of the source."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(value) for value in statements if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_no_message_names_a_page_by_its_path_in_the_source_tree():
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in SOURCES
        for text in messages(ast.parse(path.read_text()))
        if re.search(r"docs/[\w-]+\.md", text)
    ]
    assert found == []


@pytest.mark.parametrize(("page", "anchor"), LINKED)
def test_each_documentation_link_points_to_an_existing_heading(page, anchor):
    assert (ROOT / "docs" / page).is_file()
    assert not anchor or anchor in anchors(ROOT / "docs" / page)


def test_documentation_links_start_with_the_project_url():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["url"] == REPOSITORY
    urls = [line.partition(" = ")[2] for line in setup["metadata"]["project_urls"].split("\n") if line]
    assert urls
    assert all(url.startswith(REPOSITORY) for url in urls)


@pytest.mark.parametrize(("version", "revision"), [("1.2.0", "v1.2.0"), ("1.3.0.dev0", "main")])
def test_a_release_links_to_the_pages_of_its_tag(version, revision, monkeypatch):
    monkeypatch.setattr("syncd._version.__version__", version)
    copy = importlib.util.module_from_spec(importlib.util.find_spec("syncd.errors"))
    copy.__spec__.loader.exec_module(copy)
    assert f"{REPOSITORY}/blob/{revision}/docs" == copy.DOCS


ENTRIES = anchors(ROOT / "docs" / "troubleshooting.md")
MONITORING = ROOT / "examples" / "monitoring"
ALERTS = re.findall(r"- alert: (\w+)", (MONITORING / "syncd.rules.yml").read_text())


def exit_codes(kind=SyncdError):
    return {kind.exit_code}.union(*map(exit_codes, kind.__subclasses__()))


def problem_words():
    """Yield the anchor of each problem that `syncd status` may show."""
    for kind in KINDS.values():
        words = set(MountState) - {MountState.OK} if "{}" in kind.anchor else {""}
        yield from (kind.anchor.format(word) for word in words)


NEEDED = {
    "engine": {f"engine-{state}" for state in EngineState},
    "mount": {f"mount-{state}" for state in set(MountState) - {MountState.OK}},
    "step": {f"step-{state}" for state in StepState} | {"step-quarantined"},
    "alert": {alert.lower() for alert in ALERTS},
    "exit code": {f"exit-code-{code}" for code in exit_codes() | {0, INTERRUPTED, CLOSED_PIPE}},
    "problem": set(problem_words()),
}


@pytest.mark.parametrize("what", NEEDED)
def test_each_state_alert_exit_code_and_problem_has_an_entry_in_troubleshooting(what):
    assert NEEDED[what] - ENTRIES == set()


@pytest.mark.parametrize("what", ["engine", "mount", "exit code"])
def test_troubleshooting_has_no_entry_of_what_does_not_exist(what):
    prefix = what.replace(" ", "-") + "-"
    assert {entry for entry in ENTRIES if entry.startswith(prefix)} == NEEDED[what]


def test_each_alert_links_to_its_entry_in_troubleshooting():
    rules = (MONITORING / "syncd.rules.yml").read_text()
    page = f"{REPOSITORY}/blob/main/docs/troubleshooting.md"
    assert re.findall(r"runbook_url: (.*)", rules) == [f"{page}#{alert.lower()}" for alert in ALERTS]
