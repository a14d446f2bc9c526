"""`trainer export`: a step as a Hugging Face directory."""

import click

from syncd.arguments import job_argument, step_argument
from syncd.console import UncheckedPath


@click.command()
@job_argument
@step_argument()
@click.argument("out", metavar="OUT", type=UncheckedPath(file_okay=False))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    show_default="as they are",
    help="Convert the weights to this dtype.",
)
@click.option(
    "--base",
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    help="Where the model of an adapter is now, if it was moved.",
)
@click.option("--adapter", is_flag=True, help="Export an adapter alone, as peft reads it.")
@click.option("--critic", is_flag=True, help="Export the critic of a full checkpoint instead of the policy.")
def export(
    job: str, step: int, out: str, dtype: str | None, base: str | None, *, adapter: bool, critic: bool
) -> None:
    r"""Write a step or full checkpoint of JOB as the Hugging Face directory OUT. An adapter is merged into its model.

    \b
    Exit codes:
      2   there is no such step, it has no critic, it is no adapter, or OUT is taken
      3   the step is being saved, or was never finished
      65  the step is damaged, or its files do not fit together
      75  the step was removed meanwhile: `syncd pin JOB STEP` keeps it
      78  the model runs code of its own, or the model of an adapter is missing or another one

    \b
    Example:
      trainer export /shared/jobs/first 200 ./first-200 --dtype bfloat16
    """
    from trainer.export import export as write  # noqa: PLC0415

    write(job, step, out, dtype, base=base, adapter=adapter, critic=critic)
