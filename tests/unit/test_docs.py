"""The documentation names only what exists: links, headings, files, and tests of the track record."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "syncd|trainer|explorer_hooks|tests|benchmarks|examples"
FILE = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[\w./-]+\.(?:py|sh|toml|sbatch|yml|json|md)\b")
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
