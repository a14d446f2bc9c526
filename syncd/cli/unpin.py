"""`syncd unpin`: removes the pin of a step."""

import click

from syncd.arguments import job_argument, pinned_step_names, step_argument
from syncd.cli.options import json_option, json_text, open_job, state_dir_option
from syncd.protocol.request import remove_pin
from syncd.stall.verbs import MountVerb


@click.command(cls=MountVerb, changes="step {step} is still pinned")
@job_argument
@step_argument(completes=pinned_step_names)
@state_dir_option
@json_option
def unpin(job: str, step: int, state_dir: str | None, *, as_json: bool) -> None:
    r"""Remove the pin of STEP of JOB, so that retention decides again. A step without a pin is no error.

    \b
    Example:
      syncd unpin /ckpt/job 120
    """
    was_pinned = remove_pin(open_job(job, state_dir), step)
    if as_json:
        click.echo(json_text({"step": step, "pinned": False, "was_pinned": was_pinned}))
    elif was_pinned:
        click.echo(f"step {step} is no longer pinned")
    else:
        click.echo(f"step {step} was not pinned")
