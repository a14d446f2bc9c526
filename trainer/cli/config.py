"""`trainer config`: what can stand in a file."""

import click


@click.group()
def config() -> None:
    """Say what can stand in a file."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors and other tools."""
    from trainer.config.text import json_schema  # noqa: PLC0415

    click.echo(json_schema())


@config.command()
def docs() -> None:
    """Print docs/configuration.md: every key, what it takes, its default and what it means."""
    from trainer.config.text import documentation  # noqa: PLC0415

    click.echo(documentation(), nl=False)


@config.command()
def algorithms() -> None:
    """Print what algorithm.name may be, with verl's estimator and loss for each."""
    from trainer.config.algorithms import ALGORITHMS  # noqa: PLC0415

    rows = [("name", "advantage", "loss", "")]
    rows += [
        (name, known.advantage or "-", known.loss or "-", known.about) for name, known in ALGORITHMS.items()
    ]
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    for name, advantage, loss, about in rows:
        click.echo(f"{name:{first}}  {advantage:{second}}  {loss:{third}}  {about}".rstrip())
