"""Links to the documentation in messages and `--help`: absolute, from one constant, to pages that exist."""

import ast
import configparser
import importlib.util
import re

import pytest
from support.doc_pages import anchors
from support.paths import ROOT

from syncd.errors import REPOSITORY

SOURCES = [
    path for name in ("syncd", "trainer", "explorer_hooks") for path in sorted((ROOT / name).rglob("*.py"))
]


RECIPES = sorted((ROOT / "syncd" / "recipes").iterdir())
LINK = re.compile(r"(?:\{DOCS\}|@DOCS@)/([\w/-]+\.md)(?:#([\w-]+))?")
LINKED = sorted({page for path in [*SOURCES, *RECIPES] for page in LINK.findall(path.read_text())})


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
