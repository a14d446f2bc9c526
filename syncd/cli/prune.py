"""`syncd prune`: removes what retention does not keep, once, without a daemon."""

from collections.abc import Iterable
from typing import Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.daemon.retention import Decision
from syncd.errors import plain
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.mount import mount_of
from syncd.stall.verbs import MountVerb, pending_calls


@click.command(cls=MountVerb, changes="anything was removed")
@job_argument
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print which steps would be removed and kept, by which rule; remove nothing.",
)
@options.policy_options
@options.state_dir_option
@options.json_option
def prune(job: str, dry_run: bool, state_dir: str | None, as_json: bool, **policy: Any) -> None:
    r"""Remove the steps of JOB that the retention policy does not keep, once. A running daemon prunes by itself.

    The policy comes from the [daemon] table of --config, or of JOB/config.toml; options override it. Every explorer
    with a presence file counts as alive, because one reading cannot tell.

    \b
    Exit codes:
      5   a daemon leads the job: it prunes
      74  a step could not be moved; the others were removed first

    \b
    Examples:
      syncd prune /ckpt/job --dry-run
      syncd prune /ckpt/job --keep-last 1 --keep-every 100
    """
    from syncd.cli.watch import once  # noqa: PLC0415

    opened = options.open_job(job, state_dir)
    decisions = _decide(opened, policy)
    if not dry_run:
        once(opened, {**policy, **_grace(opened), "log_level": "warning"}, empty_trash=True)
    if as_json:
        steps = [{"step": d.step, "keep": d.keep, "rule": d.rule, "detail": d.detail} for d in decisions]
        options.print_json({"dry_run": dry_run, "decisions": steps})
    else:
        _show(decisions)


def _grace(job: Job) -> dict[str, float]:
    """Return the grace of removed steps: none, except on a network mount, where a late reader may still need them."""
    with pending_calls()("find", job.root):
        mount = mount_of(job.root)
    if not mount.is_network:
        return {"trash_grace": 0.0}
    click.echo(f"waiting: on {mount.type} removed steps stay readable for the trash grace", err=True)
    return {}


def _decide(job: Job, policy: dict[str, Any]) -> tuple[Decision, ...]:
    from syncd.daemon.plan import plan  # noqa: PLC0415
    from syncd.daemon.scan import examine_all  # noqa: PLC0415

    snapshot = examine_all(job, SystemClock())
    return plan(snapshot, options.read_config(job, policy)).decisions


def _show(decisions: Iterable[Decision]) -> None:
    for decision in decisions:
        verb = "keep  " if decision.keep else "remove"
        click.echo(f"{verb}  {decision.step:>8}  {decision.rule:<18}  {plain(decision.detail)}".rstrip())
