"""`trainer config`: the keys and algorithms of the file."""

import click


@click.group()
def config() -> None:
    r"""Print the keys of a job file, its JSON Schema, or the algorithms.

    \b
    Example:
      trainer config algorithms
    """


@config.command()
def schema() -> None:
    r"""Print the JSON Schema of the file, for editors and other tools.

    \b
    Example:
      trainer config schema > job.schema.json
    """
    from syncd.jobfile.model import json_schema  # noqa: PLC0415

    click.echo(json_schema())


@config.command()
def docs() -> None:
    r"""Print every key of trainer and daemon: what it takes, its default and what it means.

    \b
    Example:
      trainer config docs
    """
    from syncd.jobfile.model import KEYS  # noqa: PLC0415

    click.echo(KEYS.documentation(without="explorer"), nl=False)


@config.command()
def algorithms() -> None:
    r"""Print what algorithm.name may be: verl's estimator and loss, clip below and above, aggregation.

    \b
    Example:
      trainer config algorithms
    """
    from trainer.config.algorithms import ALGORITHMS, published  # noqa: PLC0415

    rows = [("name", "advantage", "loss", "clip", "loss_agg_mode", "")]
    rows += [
        (name, algorithm.advantage or "-", algorithm.loss or "-", *published(algorithm.loss), algorithm.about)
        for name, algorithm in ALGORITHMS.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for *cells, about in rows:
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        click.echo(f"{line}  {about}".rstrip())
