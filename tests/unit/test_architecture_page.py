"""The pages that name code name what exists: each `file.py:function`, and each package."""

import ast
import functools
import re

import pytest
from support.paths import ROOT

DOCS = ROOT / "docs"
HOP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PAGES = sorted(page.name for page in DOCS.glob("*.md") if HOP.search(page.read_text()))


@functools.cache
def names(path):
    """Return the functions, classes, methods and constants of a module, without importing it."""
    found = set()

    def collect(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text()).body, "")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_function_that_a_page_names_exists(page):
    hops = HOP.findall((DOCS / page).read_text())
    missing = [
        f"{path}:{name}"
        for path, name in hops
        if not (ROOT / path).exists() or name not in names(ROOT / path)
    ]
    assert missing == []


@pytest.mark.parametrize("life", ["a step", "a broadcast", "an experience"])
def test_the_architecture_page_traces_each_life_in_at_least_ten_hops(life):
    section = (DOCS / "architecture.md").read_text().split(f"\n## The life of {life}\n")[1].split("\n## ")[0]
    assert len(HOP.findall(section)) >= 10


def test_the_architecture_page_names_every_package():
    """Those of a part follow from its name; tests/unit/test_parts.py finds its row."""
    text = (DOCS / "architecture.md").read_text()
    folders = [
        file.parent.relative_to(ROOT)
        for top in ("syncd", "trainer", "explorer_hooks")
        for file in (ROOT / top).rglob("__init__.py")
    ]
    packages = {
        f"{folder.as_posix()}/"
        for folder in folders
        if folder.parts[1:2] != ("parts",) or len(folder.parts) == 2
    }
    assert {package for package in packages if f"`{package}`" not in text} == set()


def test_the_protocol_page_lists_the_other_code_that_deletes_in_a_job():
    section = (
        (DOCS / "protocol.md").read_text().split("\n## What else deletes inside a job\n")[1].split("\n## ")[0]
    )
    assert len(HOP.findall(section)) >= 10
