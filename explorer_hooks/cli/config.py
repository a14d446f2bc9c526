"""`explorer config`: the keys that explorers read."""

import click


@click.group()
def config() -> None:
    """Print the keys that explorers read."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors and other tools."""
    from syncd.jobfile.model import json_schema  # noqa: PLC0415

    click.echo(json_schema())


@config.command()
def docs() -> None:
    """Print every key of [explorer]: what it takes, its default and what it means."""
    from syncd.jobfile.model import KEYS  # noqa: PLC0415

    click.echo(KEYS.documentation("explorer"), nl=False)
