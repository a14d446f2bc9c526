"""`syncd rolling`: Show how a version is rolled out, or resume one that was stopped."""

from typing import Any

import click

from syncd.arguments import job_argument
from syncd.cli.options import json_option, open_job, print_json, state_dir_option, timeout_option
from syncd.errors import NotReadyError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.stall.verbs import MountVerb

AFTER = "prune"  # the verb behind which `--help` lists this one


@click.command(cls=MountVerb, changes="the stopped version is published again", only="resume")
@job_argument
@click.option(
    "--resume", is_flag=True, help="Publish the version that canaries stopped once more, for them to test."
)
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    show_default=False,
    help="With --resume: record why, for the events.",
)
@timeout_option(30.0)
@state_dir_option
@json_option
def rolling(
    job: str, *, resume: bool, reason: str, timeout: float, state_dir: str | None, as_json: bool
) -> None:
    r"""Show how the newest version of JOB is rolled out: what is tested, who loads, who waits and why.

    With --resume, a version that canaries have stopped leaves quarantine and is published again, as a new
    generation. Canaries test it first, as they did before.

    \b
    Exit codes:
      3   no versions are rolled out in this job; with --resume: the published version was not stopped
      4   with --resume: the daemon did not answer in time
      75  with --resume: the daemon refused

    \b
    Examples:
      syncd rolling /ckpt/job
      syncd rolling /ckpt/job --resume --reason "the canary's GPU was at fault"
    """
    opened = open_job(job, state_dir)
    document = _document(opened)
    if resume:
        _resume(opened, document, reason, timeout)
        document = _document(opened)
    if as_json:
        print_json({"job": opened.root, "rolling": document})
    else:
        from syncd.views import table  # noqa: PLC0415

        table.console().print(table.rolling(document))


def _document(job: Job) -> dict[str, Any]:
    from syncd.views import documents  # noqa: PLC0415
    from syncd.views.job_view import JobViewer  # noqa: PLC0415

    document = documents.rolling(JobViewer(job, SystemClock()).read())
    if document is None:
        hint = f"syncd watch {job.root} --rolling-max-paused 1, or [daemon.rolling] in the job file"
        raise NotReadyError("no versions are rolled out in this job", path=job.root, hint=hint)
    return document


def _resume(job: Job, document: dict[str, Any], reason: str, timeout: float) -> None:
    from syncd.cli.rollback import roll_back  # noqa: PLC0415
    from syncd.protocol.version import read_version  # noqa: PLC0415

    version = read_version(job)
    stopped = {(item["generation"], item["step"]) for item in document["stopped"]}
    if version is None or version.pair not in stopped:
        message = "canaries have not stopped the published version"
        raise NotReadyError(message, path=job.root, hint=f"syncd rolling {job.root}")
    roll_back(job, version.step, reason or "resumed", timeout)
