"""Links to the documentation in messages and `--help`: absolute, from one constant, to pages that exist."""

import ast
import configparser
import re
from pathlib import Path

import pytest

from syncd.errors import DOCS

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for name in ("syncd", "trainer", "explorer_hooks") for path in sorted((ROOT / name).rglob("*.py"))
]


LINK = re.compile(r"\{DOCS\}/([\w/-]+\.md)")
LINKED = sorted({page for path in SOURCES for page in LINK.findall(path.read_text())})


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


@pytest.mark.parametrize("page", LINKED)
def test_each_documentation_link_points_to_an_existing_page(page):
    assert (ROOT / "docs" / page).is_file()


def test_documentation_links_start_with_the_project_url():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert DOCS.startswith(setup["metadata"]["url"])
