"""The list of all pages on docs/README.md: the navigation of mkdocs.yml, with the titles of the pages."""

import re
from collections.abc import Iterator, Mapping

from titles import DOCS, title

_GROUP = re.compile(r"(?m)^  - (\w[\w ]*):\n((?:      .*\n)+)")
_PAGE = re.compile(r"(?m)^ +- ([\w/-]+\.md)$")


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    return {"pages": "\n".join(_groups())}


def _groups() -> Iterator[str]:
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for group, entries in _GROUP.findall(navigation):
        pages = [page for page in _PAGE.findall(entries) if page != "README.md"]
        yield f"- **{group}**: {', '.join(f'[{title(page)}]({page})' for page in pages)}"
