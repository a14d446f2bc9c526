"""`syncd rollback`: rolls explorers back to a step, as a new generation."""

import contextlib
import time

import click

from syncd.arguments import job_argument, step_argument
from syncd.cli import options
from syncd.errors import LockHeldError, NotReadyError, TimedOutError, TryAgainError, UsageError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.request import Request, read_requests, remove_request, write_request
from syncd.protocol.step import StepState
from syncd.protocol.version import Version, read_version
from syncd.stall.verbs import MountVerb

_POLL = 0.05


@click.command(cls=MountVerb, changes="explorers roll back to step {step}")
@job_argument
@step_argument()
@click.option(
    "--reason", default="", metavar="TEXT", show_default=False, help="Record why; it is shown in the events."
)
@options.timeout_option(30.0)
@options.state_dir_option
@options.json_option
def rollback(job: str, step: int, reason: str, timeout: float, state_dir: str | None, as_json: bool) -> None:
    r"""Roll explorers back to STEP of JOB, as a new generation.

    Nothing newer is published until the trainer announces another step: by its marker or tracker or, in a job
    without either, by completing one. A step in quarantine leaves it. If no daemon leads, this command publishes the
    version itself.

    \b
    Exit codes:
      2   there is no such complete step
      3   nothing is published yet
      4   the daemon did not answer in time
      75  the daemon refused

    \b
    Example:
      syncd rollback /ckpt/job 110 --reason "reward collapsed at 115"
    """
    version = roll_back(options.open_job(job, state_dir), step, reason, timeout)
    if as_json:
        document = {"generation": version.generation, "step": version.step}
        options.print_json({**document, "path": version.path, "published_at": version.published_at})
    else:
        click.echo(f"published: generation {version.generation}, step {version.step}")


def roll_back(job: Job, step: int, reason: str, timeout: float) -> Version:
    """Ask the daemon to publish a step as a new generation, and return the version."""
    _check(job, step)
    request = Request("rollback", step, reason=reason, asked_at=time.time())
    write_request(job, request)
    try:
        return _wait(job, request, timeout)
    finally:
        remove_request(job, request.identity)


def _check(job: Job, step: int) -> None:
    from syncd.daemon.scan import examine_all  # noqa: PLC0415

    snapshot = examine_all(job, SystemClock())
    if snapshot.version is None:
        raise NotReadyError("nothing is published yet", path=job.root, hint=f"syncd status {job.root}")
    target = snapshot.steps.get(step)
    if target is None or target.state is not StepState.COMPLETE:
        raise UsageError(f"step {step} is not a complete step", path=job.root, hint=f"syncd ls {job.root}")


def _wait(job: Job, request: Request, timeout: float) -> Version:
    from syncd.protocol.takeover import Candidate  # noqa: PLC0415

    ends, candidate = time.monotonic() + timeout, Candidate(job, SystemClock())
    while time.monotonic() < ends:
        if (version := read_version(job)) and version.request == request.identity:
            return version
        if request not in read_requests(job):
            refused = "the daemon refused the rollback"
            raise TryAgainError(refused, path=job.root, hint=f"tail -3 {job.events}")
        if candidate.holder() is None:
            from syncd.cli.watch import once  # noqa: PLC0415

            with contextlib.suppress(LockHeldError):  # a daemon has started meanwhile: it answers
                once(job, {"prune": False, "log_level": "warning"})
        else:
            time.sleep(_POLL)
    late = f"timed out after {timeout:g} s waiting for the daemon"
    raise TimedOutError(late, path=job.root, hint=f"syncd status {job.root}")
