"""The pages of the reference: their prose is a file of `pages/`, their tables come from the code."""

from collections.abc import Callable, Mapping
from pathlib import Path

import commands_page
import configuration_page
import events_page
import import_keys_page
import json_page
import landing_page
import metrics_page
from titles import titled

DOCS = Path(__file__).resolve().parents[1]
COMMAND = "python docs/generate"

PARTS: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "README.md": landing_page.parts,
    "commands.md": commands_page.parts,
    "configuration.md": configuration_page.parts,
    "events.md": events_page.parts,
    "import-keys.md": import_keys_page.parts,
    "json.md": json_page.parts,
    "metrics.md": metrics_page.parts,
}
"""By page: what stands in its prose as `{{name}}`."""

FILES: Mapping[str, Callable[[], str]] = {"json-schema.json": json_page.schemas}
"""Files that are made as a whole."""


def text(page: str) -> str:
    """Return a page, its prose with every part in its place, or another file."""
    if page in FILES:
        return FILES[page]()
    made = (DOCS / "generate" / "pages" / f"{page}.in").read_text()
    for name, part in PARTS[page]().items():
        mark = f"{{{{{name}}}}}"
        assert mark in made, f"pages/{page}.in has no {mark}"
        made = made.replace(mark, part.strip("\n"))
    return titled(made)


def write() -> None:
    for page in (*PARTS, *FILES):
        (DOCS / page).write_text(text(page))


def stale() -> list[str]:
    """Return the pages that are not what the code says."""
    return [page for page in (*PARTS, *FILES) if _written(page) != text(page)]


def _written(page: str) -> str:
    path = DOCS / page
    return path.read_text() if path.exists() else ""
