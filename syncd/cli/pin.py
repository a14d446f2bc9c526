"""`syncd pin`: keeps a step until it is unpinned."""

import time

import click

from syncd.arguments import job_argument, step_argument
from syncd.cli.options import json_option, json_text, open_job, state_dir_option
from syncd.errors import TryAgainError, UsageError
from syncd.protocol.disk import exists
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.request import Pin, write_pin
from syncd.stall.verbs import MountVerb


@click.command(cls=MountVerb, changes="step {step} is pinned")
@job_argument
@step_argument()
@click.option("--reason", default="", metavar="TEXT", show_default=False, help="Record why.")
@state_dir_option
@json_option
def pin(job: str, step: int, reason: str, state_dir: str | None, *, as_json: bool) -> None:
    r"""Keep STEP of JOB regardless of the retention policy, until `syncd unpin`.

    \b
    Exit codes:
      2   there is no such step
      75  the step was removed while it was being pinned

    \b
    Example:
      syncd pin /ckpt/job 120 --reason "best on the hold-out set"
    """
    from syncd.daemon.scan import examine_all  # noqa: PLC0415

    opened = open_job(job, state_dir)
    examined = examine_all(opened, SystemClock()).steps.get(step)
    if examined is None:
        raise UsageError(f"there is no step {step}", path=opened.root, hint=f"syncd ls {opened.root}")
    write_pin(opened, Pin(step, reason, time.time()))
    # Retention reads pins before and after it removes a step: a step that still exists now stays.
    if not exists(opened.disk, f"{opened.root}/{examined.directory}"):
        removed = f"step {step} was removed while it was being pinned"
        raise TryAgainError(removed, path=opened.root, hint=f"syncd ls {opened.root}")
    document = {"step": step, "pinned": True, "reason": reason}
    click.echo(json_text(document) if as_json else f"step {step} is pinned")
