"""`syncd ls`: the steps of a job, and why each is kept."""

from typing import Any

import click

from syncd.cli.options import job_argument, json_option, open_job, state_dir_option
from syncd.cli.policies import policy_options, read_config
from syncd.errors import plain
from syncd.protocol.local_disk import SystemClock
from syncd.stall.verbs import Attended


@click.command(cls=Attended)
@job_argument
@policy_options
@state_dir_option
@json_option
def ls(job: str, state_dir: str | None, as_json: bool, **policy: Any) -> None:
    r"""List the steps of JOB: state, shards there and expected, bytes, readers, and the rule that keeps each.

    The policy is that of the [daemon] table of --config or JOB/config.toml, with these options on top: what a
    daemon that was started with other options keeps may differ.

    \b
    Examples:
      syncd ls /ckpt/job
      syncd ls /ckpt/job --keep-last 1
      syncd ls /ckpt/job --json | jq '.steps[] | select(.keep | not) | .step'
    """
    # Late, so that --help need not wait for it.
    from syncd.daemon.policy import policy_of  # noqa: PLC0415
    from syncd.daemon.retention import decide  # noqa: PLC0415
    from syncd.views import json  # noqa: PLC0415
    from syncd.views.listing import listing  # noqa: PLC0415
    from syncd.views.look import Looker  # noqa: PLC0415

    place = open_job(job, state_dir)
    rules = policy_of(read_config(place, policy))
    look = Looker(place, SystemClock()).look()
    document = listing(look, decide(look.scanned, rules), rules)
    if as_json:
        click.echo(json.text(document))
    elif not document["steps"]:
        click.echo(f"no steps in {plain(place.root)}")
    else:
        from syncd.cli.status import console  # noqa: PLC0415
        from syncd.views import table  # noqa: PLC0415

        console().print(table.steps(document))
