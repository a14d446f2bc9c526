"""The tables of docs/import-keys.md: what `trainer import` does with each key of another trainer."""

import re
from collections.abc import Mapping

TITLES = {"trinity": "Trinity-RFT", "verl": "verl", "prime-rl": "prime-rl", "trl": "TRL"}


def parts() -> Mapping[str, str]:
    """Return the tables of each project by its name."""
    from trainer.parts.importing.table import PROJECTS  # noqa: PLC0415

    return {name: _tables(name) for name in PROJECTS}


def _tables(project: str) -> str:
    """Return what `trainer import --keys` prints, one level of headings below the project's own."""
    from trainer.parts.importing.key_tables import markdown  # noqa: PLC0415
    from trainer.parts.importing.table import read_table  # noqa: PLC0415

    table = read_table(project)
    printed = markdown(table).removeprefix("## Keys\n\n")
    return re.sub(r"(?m)^### (.+)$", rf"### \1: {TITLES[project]}", printed)
