"""`syncd ls`: lists the steps of a job and the rule that keeps each."""

from typing import Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.errors import plain
from syncd.protocol.local_disk import SystemClock
from syncd.stall.verbs import MountVerb


@click.command(cls=MountVerb)
@job_argument
@options.policy_options
@options.state_dir_option
@options.json_option
def ls(job: str, state_dir: str | None, as_json: bool, **policy: Any) -> None:
    r"""List the steps of JOB: state, shards, bytes, readers, and the retention rule that keeps each.

    The policy comes from the [daemon] table of --config, or of JOB/config.toml; options override it. A daemon that
    runs with other options may keep other steps.

    \b
    Examples:
      syncd ls /ckpt/job
      syncd ls /ckpt/job --keep-last 1
      syncd ls /ckpt/job --json | jq '.steps[] | select(.keep | not) | .step'
    """
    # Late, so that --help need not wait for it.
    from syncd.daemon.retention import decide  # noqa: PLC0415
    from syncd.views.job_view import JobViewer  # noqa: PLC0415
    from syncd.views.listing import listing  # noqa: PLC0415

    opened = options.open_job(job, state_dir)
    rules = options.read_config(opened, policy)
    view = JobViewer(opened, SystemClock()).read()
    document = listing(view, decide(view.scanned, rules), rules)
    if as_json:
        options.print_json(document)
    elif not document["steps"]:
        click.echo(f"no steps in {plain(opened.root)}")
    else:
        from syncd.views import table  # noqa: PLC0415

        table.console().print(table.steps(document))
