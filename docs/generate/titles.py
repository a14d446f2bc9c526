"""Titles of pages and headings: what links show on the site, where the code names a file."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[`?(?:docs/)?[\w/-]+\.md(?:#[\w-]+)?`?\]\(((?:\.\./)?[\w/-]+\.md)(?:#([\w-]+))?\)")
"""A link whose text is a file name."""

_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def title(page: str, anchor: str = "") -> str:
    """Return the heading of a page that has an anchor, else the page's title."""
    headings: list[str] = _HEADING.findall((DOCS / page).read_text())
    return next((heading for heading in headings if anchor and _anchor(heading) == anchor), headings[0])


def titled(text: str) -> str:
    """Return a text whose links show titles."""
    return LINK.sub(_titled, text)


def _titled(link: re.Match[str]) -> str:
    page, anchor = link[1], link[2] or ""
    return f"[{title(page, anchor)}]({page}{'#' if anchor else ''}{anchor})"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
