"""`explorer config`: the keys that explorers read."""

import click


@click.group()
def config() -> None:
    """Print the keys that explorers read."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file as explorers see it."""
    import json  # noqa: PLC0415

    from explorer_hooks.run.config import ExplorerFile  # noqa: PLC0415

    click.echo(json.dumps(ExplorerFile.model_json_schema(), indent=2))


@config.command()
def docs() -> None:
    """Print the last part of docs/explorer-run.md: every key of [explorer]."""
    from explorer_hooks.run.load import documentation  # noqa: PLC0415

    click.echo(documentation(), nl=False)
