"""`explorer config`: the keys that explorers read."""

import click


@click.group()
def config() -> None:
    r"""Print the keys that explorers read, or the JSON Schema of the file.

    \b
    Example:
      explorer config docs
    """


@config.command()
def schema() -> None:
    r"""Print the JSON Schema of the file, for editors and other tools.

    \b
    Example:
      explorer config schema > job.schema.json
    """
    from syncd.jobfile.model import json_schema  # noqa: PLC0415

    click.echo(json_schema())


@config.command()
def docs() -> None:
    r"""Print every key of [explorer]: what it takes, its default and what it means.

    \b
    Example:
      explorer config docs
    """
    from syncd.jobfile.model import KEYS  # noqa: PLC0415

    click.echo(KEYS.documentation("explorer"), nl=False)
