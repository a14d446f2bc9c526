"""`trainer plot`: draw the curves of a job as a picture."""

import click

from syncd.arguments import job_argument
from syncd.console import UncheckedPath

AFTER = "config"  # the verb behind which `--help` lists this one


@click.command()
@job_argument
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=UncheckedPath(),
    show_default="JOB/plot.png",
    help="The picture to write.",
)
def plot(job: str, out: str | None) -> None:
    r"""Draw the curves of JOB, such as reward, loss, staleness and sync times, and print the path of the picture.

    The ending of FILE decides the format: .png, .svg or .pdf.

    \b
    Example:
      trainer plot /shared/jobs/first -o curves.png
    """
    from trainer.parts.plot.plot import plot as draw  # noqa: PLC0415

    click.echo(draw(job, out or f"{job}/plot.png"))
