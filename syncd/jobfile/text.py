"""The documentation of all keys of a file, in Markdown."""

from collections.abc import Iterator, Sequence

from syncd.jobfile.keys import Key, Keys
from syncd.jobfile.problems import shown

_HEADING = "## Keys\n"


def documentation(keys: Keys, under: str = "") -> str:
    """Return every key of each table, as the last part of a page.

    Args:
        keys: The keys of the file.
        under: Only tables of this dotted name and below it; all unless given.
    """
    return "\n".join([_HEADING, *_sections(keys, under)])


def _sections(keys: Keys, under: str) -> Iterator[str]:
    for table, about in keys.tables.items():
        if under and table != under and not table.startswith(f"{under}."):
            continue
        own = [key for key in keys.all.values() if key.name.rpartition(".")[0] == table]
        yield f"### [{table}]\n\n{about}\n\n{_table(own, table)}\n"
    for key in (key for key in keys.all.values() if "." not in key.name and not under):
        name = f"[{key.name}]" if key.is_free else f"[[{key.name}]]"
        yield f"### {name}\n\n{key.about}\n"


def _table(own: Sequence[Key], table: str) -> str:
    rows = [_row(key, key.name.removeprefix(f"{table}.")) for key in own]
    return "\n".join(["| key | takes | default | |", "|---|---|---|---|", *rows])


def _row(key: Key, name: str) -> str:
    default = "**required**" if key.required else f"`{shown(key.default)}`"
    mark = " *fixed*" if key.fixed else ""
    return f"| `{name}` | {key.expected} | {default} | {key.about}{mark} |"
