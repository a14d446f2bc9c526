"""The job's file as an argument of explorers' commands."""

import click


def checked_config(name: str, value: str) -> str:
    if not value or value.startswith("--"):
        raise click.BadParameter(f"{value!r} is not a file; {name} comes before --section.key value")
    return value
