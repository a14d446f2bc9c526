"""The pages of the documentation as a viewer sees them: their prose, their links, the anchors of their headings."""

import functools
import re
from pathlib import Path

from support.paths import ROOT
from syncd.errors import REPOSITORY

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "tests" / "RECORD.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TREE = f"{REPOSITORY}/blob/main/"
_OF_MESSAGES = re.compile(r"(?:\{DOCS\}|@DOCS@)/([\w/-]+\.md)(?:#([\w-]+))?")
_OF_ENTRIES = re.compile(r"\{TROUBLESHOOTING\}#([\w-]+)(?![\w{-])")


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks, in which brackets are no links."""
    return re.sub(r"^ {4}[^\n]*$|^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown viewer gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Return the links of a page into this repository: as written, the file, and the anchor."""
    found = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if path.startswith(_TREE):
            found.append((link, ROOT / path.removeprefix(_TREE), anchor))
        elif "://" not in path:
            found.append((link, (page.parent / path).resolve() if path else page, anchor))
    return found


def message_links(source: str) -> set[tuple[str, str]]:
    """Return the links to the documentation in a module or recipe: the page, and the anchor or nothing."""
    entries = {("troubleshooting.md", anchor) for anchor in _OF_ENTRIES.findall(source)}
    return {(page, anchor) for page, anchor in _OF_MESSAGES.findall(source)} | entries
