"""`trainer republish`: republish the steps of a running job of another trainer as safetensors."""

import click

from syncd.console import UncheckedPath

AFTER = "import"
"""The verb behind which `--help` lists this one."""

DTYPES = ("keep", "bfloat16", "float16", "float32")


@click.command()
@click.argument("job", metavar="JOB", type=UncheckedPath(file_okay=False))
@click.option(
    "--to",
    metavar="DIR",
    required=True,
    type=UncheckedPath(file_okay=False),
    help="The job that gets the steps; it is made if it does not exist.",
)
@click.option("--once", is_flag=True, help="End after the newest step.")
@click.option(
    "--state-dir",
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    show_default="JOB/.syncd",
    help="The state directory of JOB.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Dtype of weights that become safetensors."
)
def republish(job: str, to: str, once: bool, state_dir: str | None, dtype: str) -> None:  # noqa: FBT001
    r"""Publish each step of JOB, a running job of Trinity-RFT or verl, as safetensors in a second job.

    Files of FSDP's ranks or of Megatron become safetensors, which any hook follows. Where no daemon leads one of the
    jobs, the command starts one. It runs until SIGTERM; a step that is damaged or not finite is passed over.

    \b
    Exit codes:
      3   with --once: no version was published in 2 minutes
      65  with --once: the step is damaged, or not finite

    \b
    Examples:
      trainer republish /ckpt/verl-job --to /ckpt/verl-job-syncd
      trainer republish /ckpt/verl-job --to /ckpt/verl-job-syncd --dtype keep --once
    """
    from trainer.parts.importing.republish import republish_steps  # noqa: PLC0415 - it imports torch

    republish_steps(
        job, to, click.echo, state_dir=state_dir, dtype=None if dtype == "keep" else dtype, once=once
    )
