"""What explorers' commands share: the job's file as an argument, and the options of those that explore."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from syncd.jobfile.overrides import JobFileCommand, config_argument, overrides_argument, trust_option

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile

F = TypeVar("F", bound=Callable[..., Any])


def health_option(command: F) -> F:
    """Add `--health`, an address to answer health checks at."""
    text = "Answer HTTP requests: 200 while the engine is ready, else 503. Without HOST on this host only."
    return click.option("--health", metavar="HOST:PORT", help=text)(command)


def explorer_command(work: Callable[..., None]) -> click.Command:
    """Return the command of an explorer: CONFIG, keys of the file after it, and what `run` and `serve` share."""
    dry_run = "Check the keys of the file and print what was read; open neither model nor tasks nor code."
    name = "The explorer's identity."
    for add in (
        click.option("--dry-run", is_flag=True, help=dry_run),
        health_option,
        click.option("--name", metavar="NAME", show_default="explorer.name of CONFIG", help=name),
        trust_option,
        overrides_argument,
        config_argument,
    ):
        work = add(work)
    return click.command(cls=JobFileCommand)(work)


def named(overrides: tuple[str, ...], name: str | None) -> tuple[str, ...]:
    """Return the keys that are given beside the file, `--name` among them."""
    return overrides if name is None else (*overrides, f"--explorer.name={name}")


def show(file: "JobFile") -> None:
    """Print what explorers read of a file."""
    click.echo(file.model_dump_json(indent=2, include={"job", "model", "data", "sync", "explorer"}))
