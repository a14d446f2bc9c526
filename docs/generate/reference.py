"""The pages of the reference: their prose is a file of `pages/`, their tables come from the code."""

from collections.abc import Callable, Mapping
from pathlib import Path

import commands_page
import configuration_page
import events_page
import import_keys_page
import metrics_page

DOCS = Path(__file__).resolve().parents[1]
COMMAND = "python docs/generate"

PARTS: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "commands.md": commands_page.parts,
    "configuration.md": configuration_page.parts,
    "events.md": events_page.parts,
    "import-keys.md": import_keys_page.parts,
    "json.md": dict,
    "metrics.md": metrics_page.parts,
}
"""By page: what stands in its prose as `{{name}}`."""


def text(page: str) -> str:
    """Return a page: its prose with every part in its place."""
    made = (DOCS / "generate" / "pages" / f"{page}.in").read_text()
    for name, part in PARTS[page]().items():
        mark = f"{{{{{name}}}}}"
        assert mark in made, f"pages/{page}.in has no {mark}"
        made = made.replace(mark, part.strip("\n"))
    return made


def write() -> None:
    for page in PARTS:
        (DOCS / page).write_text(text(page))


def stale() -> list[str]:
    """Return the pages that are not what the code says."""
    return [page for page in PARTS if (DOCS / page).read_text() != text(page)]
