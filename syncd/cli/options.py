"""Options and arguments that several verbs share."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from syncd.console import UncheckedPath
from syncd.errors import JobMissingError, UsageError
from syncd.protocol.layout import Job, parse_step_name
from syncd.protocol.owner import check_owner, is_own
from syncd.stall.calls import PendingCalls, tracked
from syncd.stall.verbs import pending_calls

SCHEMA_VERSION = 1
"""Grows when a documented field changes its meaning or goes; new fields may come without."""

F = TypeVar("F", bound=Callable[..., Any])


def job_argument(command: F) -> F:
    """Add the argument JOB, the job directory; `open_job` checks it."""
    return click.argument("job", metavar="JOB", type=UncheckedPath())(command)


def state_dir_option(command: F) -> F:
    """Add `--state-dir`."""
    text = "Directory of the daemon's files if it does not write to the job directory; default: JOB/.syncd."
    return click.option("--state-dir", type=UncheckedPath(), envvar="SYNCD_STATE_DIR", help=text)(command)


def json_option(command: F) -> F:
    """Add `--json` as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON; docs/json.md is the contract."""
    import json  # noqa: PLC0415 - most commands print none

    return json.dumps({"schema_version": SCHEMA_VERSION, **document}, allow_nan=False)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document as one line of JSON."""
    click.echo(json_text(document))


def exit_on_sigterm() -> None:
    """Exit on SIGTERM through `sys.exit`, so that the command cleans up and restores the terminal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def timeout_option(default: float) -> Callable[[F], F]:
    """Return a decorator that adds `--timeout` with a default in seconds."""
    kind = click.FloatRange(min=0)
    return click.option(
        "--timeout",
        type=kind,
        default=default,
        show_default=True,
        metavar="S",
        help="Give up after this many seconds.",
    )


def open_job(job: str, state_dir: str | None, calls: PendingCalls | None = None) -> Job:
    """Return the job; its calls to the file system are noted.

    Args:
        job: The job directory, as it was given.
        state_dir: The state directory, as it was given.
        calls: Where they are noted; by default where the verb that runs notes its calls.

    Raises:
        JobMissingError: There is no such directory.
        UsageError: It is a step.
    """
    noting = calls or pending_calls()
    place = find_job(job, state_dir, noting)
    with noting("stat", place.root):
        is_there = os.path.isdir(place.root)
    if not is_there:
        hint = f"findmnt -T {job}, or for a new one: mkdir -p {job}"
        raise JobMissingError("the job directory does not exist", path=job, hint=hint)
    return place


def find_job(job: str, state_dir: str | None, calls: PendingCalls | None = None) -> Job:
    """Return the job, whose directory need not exist yet.

    Raises:
        UsageError: It is a step.
        ConfigError: The state directory belongs to another job.
    """
    noting = calls or pending_calls()
    with noting("find", os.path.abspath(job)):
        directory, name = os.path.split(os.path.realpath(job))
        if parse_step_name(name) is not None:
            raise UsageError(f"{job} is a step; its job is {directory}")
        place = tracked(Job.at(job, state_dir), noting)
    if not is_own(place):
        check_owner(place)
    return place
