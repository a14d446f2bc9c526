"""What the verbs that take a file share."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from trainer.config.changes import Contradiction
    from trainer.config.model import JobConfig

F = TypeVar("F", bound=Callable[..., Any])

TAKES_KEYS = {"ignore_unknown_options": True}
"""Click's settings of a command whose further options are keys of the file."""


def config_argument(command: F) -> F:
    """Add CONFIG and everything after it that is an option of the file."""
    rest = click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
    return click.argument("config", metavar="CONFIG", callback=_file)(rest(command))


def nproc_option(command: F) -> F:
    """Add `--nproc`."""
    text = "Ranks to start on this machine, whatever trainer.nproc says."
    return click.option("--nproc", type=click.IntRange(min=1), metavar="N", help=text)(command)


def dry_run_option(command: F) -> F:
    """Add `--dry-run`."""
    text = "Print the resolved file, check the model's files and change nothing."
    return click.option("--dry-run", is_flag=True, help=text)(command)


def allow_change_option(command: F) -> F:
    """Add `--allow-change`."""
    text = "Let a key differ from what the job was started with, and record it. May be given several times."
    return click.option("--allow-change", "allowed", multiple=True, metavar="KEY", help=text)(command)


def show(config: "JobConfig", found: "Sequence[Contradiction]", allowed: Collection[str] = ()) -> None:
    """Print a resolved configuration, and on stderr its job directory and what contradicts the job there."""
    from trainer.config.model import to_toml  # noqa: PLC0415

    click.echo(to_toml(config), nl=False)
    click.echo(f"job directory: {config.job.dir}", err=True)
    for contradiction in found:
        kind = "change" if contradiction.key in allowed else "contradiction"
        click.echo(f"{kind}: {contradiction}", err=True)


def _file(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value or value.startswith("--"):
        raise click.BadParameter(f"{value!r} is no file; CONFIG comes before --section.key value")
    return value
