"""The job's file as an argument of explorers' commands."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from syncd.jobfile.keys import Keys


def config_keys() -> "Keys":
    """Return the keys that explorers read."""
    from explorer_hooks.run.config import ExplorerFile  # noqa: PLC0415
    from syncd.jobfile.keys import Keys  # noqa: PLC0415

    return Keys(ExplorerFile, ())


def checked_config(name: str, value: str) -> str:
    """Return the path of a job's file.

    Raises:
        click.BadParameter: It looks like an option.
    """
    if not value or value.startswith("--"):
        raise click.BadParameter(f"{value!r} is not a file; {name} comes before --section.key value")
    return value
