"""The keys of a project in Markdown, for `trainer import --keys` and docs/import-keys.md; needs no other package."""

import re

from syncd.errors import DOCS
from trainer.parts.importing.table import Row, Table

_PAGE = re.compile(rf"{re.escape(DOCS)}/([\w-]+\.md(?:#[\w-]+)?)")


def markdown(table: Table) -> str:
    parts = [f"## Keys\n\nOf {table.title} {table.read}. `*` stands for anything.\n"]
    for kind, title, head in (
        ("mapped", "Mapped", "| theirs | ours | |\n|---|---|---|"),
        ("by_hand", "Left to you", "| theirs | what to do |\n|---|---|"),
        ("unsupported", "Not supported", "| theirs | why | instead |\n|---|---|---|"),
        ("not_needed", "Not needed here", "| theirs | why |\n|---|---|"),
    ):
        lines = [_line(row) for row in table.rows if row.kind == kind]
        parts.append("\n".join([f"### {title}\n", head, *lines, ""]))
    return _PAGE.sub(r"[\1](\1)", "\n".join([*parts, _defaults(table)]))


def _line(row: Row) -> str:
    theirs = ", ".join(f"`{key}`" for key in row.theirs)
    if row.kind == "mapped":
        return f"| {theirs} | {', '.join(f'`{key}`' for key in row.ours)} | {row.about} |"
    if row.kind == "unsupported":
        off = f" (unless {' or '.join(_code(value) for value in row.off)})" if row.off else ""
        return f"| {theirs} | {row.about}{off} | {row.instead or 'leave it out: `--without KEY`'} |"
    return f"| {theirs} | {row.about} |"


def _code(value: object) -> str:
    """Return a value as code; an empty text would be no code in Markdown."""
    return "`''`" if value == "" else f"`{value}`"


def _defaults(table: Table) -> str:
    rows = [f"| `{key}` | `{value}` |" for key, value in table.defaults.items()]
    about = f"Defaults of {table.title} that are written where the file does not set them:"
    return "\n".join([f"### Defaults\n\n{about}\n", "| theirs | value |\n|---|---|", *rows, ""])
