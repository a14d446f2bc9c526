"""The documentation names only what exists: links, headings, files, and tests of the track record."""

import ast
import functools
import re

import pytest
from support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "syncd|trainer|explorer_hooks|tests|benchmarks|examples"
FILE = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[\w./-]+\.(?:py|sh|toml|sbatch|yml|json|md)\b")
DOTTED = re.compile(r"\b(?:syncd|trainer|explorer_hooks)(?:\.\w+)+")
IMPORT = re.compile(r"from ((?:syncd|trainer|explorer_hooks)[\w.]*) import ([\w, ]+)")
TEST_FILE = re.compile(r"`(test_\w+)(?:\.py)?`")
GUARD = re.compile(r"(tests/[\w/]+\.py)?::(\w+)")


def prose(page):
    """Return the text of a page without its code blocks, in which brackets are no links."""
    return re.sub(r"^ {4}.*$|^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page):
    """Return the anchors that a Markdown viewer gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page():
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= named


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


def test_every_test_that_the_track_record_names_exists():
    missing = []
    for row in (ROOT / "docs" / "track-record.md").read_text().splitlines():
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
    imported = {
        name.asname or name.name for node in body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assigned = {name.id for node in body for name in ast.walk(node) if isinstance(name, ast.Name)}
    return names_in(file) | imported | assigned


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_name_that_a_page_names_exists(page):
    text = page.read_text() if page.name != "track-record.md" else ""
    dotted = set(DOTTED.findall(text))
    for module, imported in IMPORT.findall(text):
        dotted |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    found = {name: module_of(name) for name in dotted}
    assert {
        name for name, place in found.items() if place and place[1] and place[1] not in bound_in(place[0])
    } == set()
