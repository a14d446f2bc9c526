"""The tables of all sources, and which of them a file belongs to."""

from collections.abc import Mapping
from typing import Any

from syncd.errors import UsageError
from trainer.parts.importing.prime_rl import PRIME_RL
from trainer.parts.importing.rows import Table
from trainer.parts.importing.trinity import TRINITY
from trainer.parts.importing.trl import TRL
from trainer.parts.importing.verl import VERL_TABLE

TABLES: Mapping[str, Table] = {table.name: table for table in (TRINITY, VERL_TABLE, PRIME_RL, TRL)}
"""By the names that `trainer import --from` takes."""


def table_of(values: Mapping[str, Any], name: str | None, path: str) -> Table:
    """Return the table of a file.

    Args:
        values: The file's values by dotted keys.
        name: What the user calls the source; None to tell by the keys.
        path: The file, for the error.
    """
    if name is not None:
        return TABLES[name]
    found = [table for table in TABLES.values() if table.is_marked(values)]
    if len(found) == 1:
        return found[0]
    what = " and ".join(table.title for table in found) if found else "no known project"
    raise UsageError(f"its keys look like {what}", path=path, hint=f"--from {' or '.join(TABLES)}")
