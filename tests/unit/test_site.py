"""What the site is built from: each page is in the navigation, what is generated is up to date, names exist."""

import ast
import re
import subprocess
import sys

import pytest
import yaml
from support.paths import ROOT

from syncd.errors import REPOSITORY

sys.path.insert(0, str(ROOT / "docs" / "generate"))
import commands_page
import reference
import titles

DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
TITLES = (
    "Start",
    "Sync",
    "Train and explore",
    "Operate",
    "Why trust it",
    "Reference",
    "Specification",
)
PUBLIC = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing what its tags name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture(scope="module")
def settings():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def leaves(entry):
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(part)


def test_each_page_is_in_the_navigation_once(settings):
    assert sorted(leaves(settings["nav"])) == PAGES, "add the page to `nav` of mkdocs.yml"
    assert tuple(title for part in settings["nav"] for title in part) == TITLES


def test_the_site_is_strict_and_belongs_to_the_repository(settings):
    assert settings["strict"] is True
    assert set(settings["validation"].values()) == {"warn"}
    assert [link["link"] for link in settings["extra"]["social"]] == [REPOSITORY]
    assert (settings["docs_dir"], settings["site_dir"]) == ("docs", "out/site")


def test_the_site_has_pages_alone_and_asks_no_other_host(settings):
    others = {
        path.relative_to(DOCS).parts[0] for path in DOCS.rglob("*.*") if path.suffix in (".py", ".html")
    }
    assert others <= {name.rstrip("/") for name in settings["exclude_docs"].split()} | {"__pycache__"}
    assert "repo_url" not in settings, "the theme asks the forge's API on each page"
    assert settings["theme"]["font"] is False
    named = [*settings["extra_css"], *settings["extra_javascript"]]
    assert [name for name in named if not (DOCS / name).is_file()] == []
    assert not [page for page in PAGES if "```mermaid" in (DOCS / page).read_text()], "drawings are SVG"


def test_links_between_pages_show_titles():
    named = {page: found for page in PAGES if (found := titles.LINK.findall((DOCS / page).read_text()))}
    assert named == {}, "write the page's title, or the heading, in place of its file's name"


@pytest.mark.parametrize("page", reference.PARTS)
def test_each_generated_page_is_what_the_code_says(page):
    assert reference.text(page) == (DOCS / page).read_text(), f"run {reference.COMMAND}"


def test_the_generator_needs_no_more_than_the_extra_docs():
    """`make docs` has an environment without torch, numpy and pyarrow."""
    code = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "pyarrow numpy torch verl transformers tokenizers starlette".split():
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["docs/generate", "--check"]
runpy.run_path("docs/generate", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_every_command_is_on_the_page_of_commands():
    page = (DOCS / "commands.md").read_text()
    for name, group in commands_page.groups().items():
        for verb in group.list_commands(None):
            assert f"\n### {name} {verb}\n" in page


def names(file):
    """Return what a module defines at its top level."""
    body = ast.parse(file.read_text()).body
    assigned = {name.id for node in body for name in ast.walk(node) if isinstance(name, ast.Name)}
    return assigned | {node.name for node in body if hasattr(node, "name")}


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_each_public_name_exists(page):
    found = PUBLIC.findall(page.read_text())
    assert found
    for dotted in found:
        *parents, last = dotted.split(".")
        module = ROOT.joinpath(*parents, last).with_suffix(".py")
        package = ROOT.joinpath(*parents)
        init = package / "__init__.py"
        file = init if init.is_file() else package.with_suffix(".py")
        assert module.is_file() or last in names(file), dotted
