"""The documentation names only what exists: links, headings, files, and tests of the record."""

import ast
import functools
import re

import pytest
from support.doc_pages import PAGES, anchors, links
from support.paths import ROOT

FOLDERS = "syncd|trainer|explorer_hooks|tests|benchmarks|examples"
FILE = re.compile(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]+\.(?:py|sh|toml|sbatch|yml|json|md)\b")
DOTTED = re.compile(r"\b(?:syncd|trainer|explorer_hooks)(?:\.\w+)+")
IMPORT = re.compile(r"from ((?:syncd|trainer|explorer_hooks)[\w.]*) import ([\w, ]+)")
TEST_FILE = re.compile(r"`(test_\w+)(?:\.py)?`")
GUARD = re.compile(r"(tests/[\w/]+\.py)?::(\w+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_points_to_an_existing_file_and_heading(page):
    for link, target, anchor in links(page):
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_no_page_of_the_site_links_out_of_it_by_a_path():
    """The site has the pages of docs/ alone, so a link to any other file must be an address."""
    docs = ROOT / "docs"
    assert [
        link
        for page in docs.rglob("*.md")
        for link, at, _ in links(page)
        if "://" not in link and docs not in at.parents
    ] == []


def test_links_behind_a_block_of_code_count(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](a.md)\n\n    code [b](b.md)\n\n[c](c.md)\n\n```\n[d](d.md)\n```\n\n[e](e.md)\n")
    assert [link for link, _, _ in links(page)] == ["a.md", "c.md", "e.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    assert {name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()} == set()


def test_every_test_file_that_a_page_names_exists():
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for page in PAGES for name in TEST_FILE.findall(page.read_text())}
    assert named - files == set()


@functools.cache
def names_in(path):
    """Return the names of all functions and classes of a test file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_test_that_the_record_names_exists():
    missing = []
    for row in (ROOT / "tests" / "RECORD.md").read_text().splitlines():
        path = None
        for named, test in GUARD.findall(row.rsplit(" | ", 1)[-1]):
            path = named or path
            if path and not ((ROOT / path).exists() and test in names_in(ROOT / path)):
                missing.append(f"{path}::{test}")
    assert missing == []


def module_of(dotted):
    """Return the file of the longest prefix that is a module, and the name within it; None if it is no module."""
    parts = dotted.split(".")
    for count in range(len(parts), 1, -1):
        base = ROOT.joinpath(*parts[:count])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return file, parts[count] if count < len(parts) else ""
    return None


def bound_in(file):
    """Return the names that a module defines or imports at its top level."""
    body = ast.parse(file.read_text()).body
    typed = [inner for node in body if isinstance(node, ast.If) for inner in node.body]  # TYPE_CHECKING
    imported = {
        name.asname or name.name
        for node in (*body, *typed)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assigned = {name.id for node in body for name in ast.walk(node) if isinstance(name, ast.Name)}
    return names_in(file) | imported | assigned


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_name_that_a_page_names_exists(page):
    text = page.read_text() if page.name != "RECORD.md" else ""
    dotted = set(DOTTED.findall(text))
    for module, imported in IMPORT.findall(text):
        dotted |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    found = {name: module_of(name) for name in dotted}
    assert {
        name for name, place in found.items() if place and place[1] and place[1] not in bound_in(place[0])
    } == set()
