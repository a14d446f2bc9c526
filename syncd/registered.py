"""What installed packages register by entry points: commands, transports, engines, and all else that a part brings.

The core names groups, and a part the objects in them, in setup.cfg. An object is imported once it is used.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DAEMON_PARTS = "syncd.daemon_parts"  # what works in the daemon's ticks (`syncd/daemon/parts.py`)

DAEMON_TABLES = "syncd.daemon_tables"
"""The tables of such parts below [daemon], by the name of the part: a `PartTable` each (`syncd/config.py`)."""

EXAM = "explorer.exam"
"""What examines engines that are started (`explorer_hooks/follower/start_checks.py`)."""

GATES = "explorer.gates"
"""What a follower waits for between fetching a version and loading it (`explorer_hooks/follower/gate.py`)."""


def registered(group: str) -> Mapping[str, "EntryPoint"]:
    """Return the entry points of a group by name, in the order of names; nothing is imported."""
    # Late: it takes a fifth of the time in which a verb starts, and most need no part.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in sorted(entry_points(group=group))}
