"""Options and arguments that several verbs share."""

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from syncd.errors import JobMissingError, UsageError
from syncd.protocol.layout import Job, parse_step_name

F = TypeVar("F", bound=Callable[..., Any])


class Place(click.Path):
    """A path that nobody looks at while the command line is read: its mount may not answer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Return the path as it was given."""
        return value


def job_argument(command: F) -> F:
    """Add the argument JOB, the job directory."""
    return click.argument("job", metavar="JOB", type=Place(), callback=_job)(command)


def unasked_job_argument(command: F) -> F:
    """Add the argument JOB for a command that looks at it within bounds of its own, by `check_job`."""
    return click.argument("job", metavar="JOB", type=Place())(command)


def state_dir_option(command: F) -> F:
    """Add `--state-dir`."""
    text = "Where the daemon's files are, when the job directory is not its to write; JOB/.syncd otherwise."
    return click.option("--state-dir", type=Place(), envvar="SYNCD_STATE_DIR", help=text)(command)


def json_option(command: F) -> F:
    """Add `--json` as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document (docs/json.md).")(
        command
    )


def timeout_option(default: float) -> Callable[[F], F]:
    """Return what adds `--timeout` with a default in seconds."""
    kind = click.FloatRange(min=0)
    return click.option(
        "--timeout",
        type=kind,
        callback=_finite,
        default=default,
        show_default=True,
        metavar="S",
        help="Seconds.",
    )


def open_job(job: str, state_dir: str | None) -> Job:
    """Return the job.

    Raises:
        JobMissingError: There is no such directory.
    """
    if not os.path.isdir(job):
        hint = f"findmnt -T {job}, or for a new one: mkdir -p {job}"
        raise JobMissingError("there is no job directory", path=job, hint=hint)
    return Job.at(job, state_dir)


def _job(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        return check_job(value)
    except UsageError as error:
        raise click.BadParameter(error.message) from None


def check_job(value: str) -> str:
    """Return a job directory as it was given.

    Raises:
        UsageError: It is empty, or it is a step.
    """
    if not value:
        raise UsageError("it is empty; is a shell variable unset?")
    directory, name = os.path.split(os.path.realpath(value))
    if parse_step_name(name) is not None:
        raise UsageError(f"{value} is a step; its job is {directory}")
    return value


def _finite(_: click.Context, __: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter("every wait has an end")
    return value
