"""What an import says: lines for people, and a source's keys in Markdown."""

import re
from collections.abc import Iterator, Mapping

from syncd.errors import DOCS, plain
from trainer.parts.importing.apply import Outcome, few
from trainer.parts.importing.run import Imported
from trainer.parts.importing.table import Row, Table

_PAGE = re.compile(rf"{re.escape(DOCS)}/([\w-]+\.md(?:#[\w-]+)?)")


def report(imported: Imported, to: str | None) -> Iterator[str]:
    """Yield the lines that say what became of each key; `to` is the job's file, None for standard output."""
    outcome = imported.outcome
    yield from _refusals(outcome)
    yield from _notes("left to you", outcome.by_hand)
    yield from _notes("not needed here", outcome.unneeded)
    if outcome.refusals:
        count = len(outcome.refusals)
        yield f"nothing written: {count} {'key' if count == 1 else 'keys'} of {imported.table.title} cannot be mapped"
    else:
        set_count = sum(entry.is_given for entry in outcome.entries.values())
        others = len(outcome.entries) - set_count
        where = f"{to}: " if to else ""
        yield f"{where}{set_count} keys, and {others} defaults of {imported.table.title} that are not ours"


def _refusals(outcome: Outcome) -> Iterator[str]:
    if outcome.refusals:
        yield "cannot be mapped:"
    for refusal in outcome.refusals:
        yield plain(f"  {refusal.key}: {refusal.why}")
        yield plain(f"    -> {refusal.instead.replace('KEY', refusal.key)}")


def _notes(title: str, notes: Mapping[str, str]) -> Iterator[str]:
    if notes:
        yield f"{title}:"
    for why in dict.fromkeys(notes.values()):
        keys = [key for key, reason in notes.items() if reason == why]
        yield plain(f"  {few(keys)}: {why}")


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
