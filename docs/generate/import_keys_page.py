"""The tables of docs/import-keys.md: what `trainer import` does with each key of another trainer."""

import re
from collections.abc import Mapping
from pkgutil import resolve_name

TITLES = {"trinity": "Trinity-RFT", "verl": "verl", "prime-rl": "prime-rl", "trl": "TRL"}
_PART = "trainer.parts.importing"
"""Imported by its name: the type checker passes in a tree without the part, too."""


def parts() -> Mapping[str, str]:
    """Return the tables of each project by its name."""
    return {name: _tables(name) for name in resolve_name(f"{_PART}.table:PROJECTS")}


def _tables(project: str) -> str:
    """Return what `trainer import --keys` prints, one level of headings below the project's own."""
    table = resolve_name(f"{_PART}.table:read_table")(project)
    printed: str = resolve_name(f"{_PART}.key_tables:markdown")(table)
    headed = printed.removeprefix("## Keys\n\n")
    return re.sub(r"(?m)^### (.+)$", rf"### \1: {TITLES[project]}", headed)
