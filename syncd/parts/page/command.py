"""`syncd serve`: serve one live page about a job."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from syncd.cli import options
from syncd.console import UncheckedPath
from syncd.errors import UsageError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock

if TYPE_CHECKING:
    from syncd.parts.page.jobs import ServedJob
    from syncd.parts.page.poller import SharedPoll
    from syncd.parts.page.site import Site

AFTER = "status"  # the verb behind which `--help` lists this one

_FIRST_POLL = 5.0


@click.command()
@click.argument("jobs", metavar="[JOB]...", nargs=-1, type=UncheckedPath(file_okay=False))
@click.option(
    "--root",
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    help="Serve the jobs in this directory and in the directories in it, also those that come later.",
)
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Listen on this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8420,
    metavar="PORT",
    help="Port; 0 takes a free one. The first line of output is the address of the page.",
)
@click.option(
    "--expose",
    is_flag=True,
    help="Allow a --host that others can reach. There is no password: anyone who reaches the page can read it.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Answer to this name too, such as that of a proxy. May be given several times.",
)
@options.seconds_option(
    "--every", "Read the job after this many seconds, while somebody watches.", 2.0, 0.5, 3600
)
@click.option(
    "--rollouts",
    is_flag=True,
    help="Show kept experiences too: prompts, answers and rewards. Anyone who reaches the page can read them.",
)
@options.policy_options
@options.state_dir_option
def serve(
    jobs: tuple[str, ...],
    *,
    root: str | None,
    host: str,
    port: int,
    expose: bool,
    names: tuple[str, ...],
    every: float,
    rollouts: bool,
    state_dir: str | None,
    **policy: Any,
) -> None:
    r"""Serve a live page about JOB: trainer, versions, shards, explorers, disk, and why each step stays or goes.

    With several jobs, or with --root, the first page is an overview with one line for each job.

    Needs neither a daemon nor write permission. The page is on this host only. To see it from elsewhere, forward the
    port: ssh -L 8420:127.0.0.1:8420 HOST. The retention policy is found as `syncd ls` finds it.

    \b
    Exit codes:
      0   after SIGTERM or Ctrl-C
      2   --host is no address, or others can reach it and --expose is missing
      74  there is no such job directory
      78  the address is taken, or none of this host's

    \b
    Examples:
      syncd serve /ckpt/job
      syncd serve /ckpt/job --port 0
      syncd serve --root /ckpt
      curl -s http://127.0.0.1:8420/data.json | jq .status.version.step
    """
    from syncd.parts.page import server  # noqa: PLC0415
    from syncd.parts.page.document import PageReader  # noqa: PLC0415
    from syncd.parts.page.jobs import ServedJob  # noqa: PLC0415
    from syncd.parts.page.routes import file_routes  # noqa: PLC0415

    _check_jobs(jobs, root, state_dir)
    address = server.address_of(host)
    if not server.is_loopback(address):
        _warn(" ".join(jobs) or f"--root {root}", address, exposed=expose, rollouts=rollouts)
    clock = SystemClock()

    def opened(job: str, overview: str | None = "../../") -> ServedJob:
        def find() -> Job:
            return options.open_job(job, state_dir)

        reader = PageReader(find, lambda job_of_page: options.read_config(job_of_page, policy), clock)
        routes = file_routes(find, clock, every, with_rollouts=rollouts)
        return ServedJob(os.path.abspath(job), reader, routes, clock, every, overview)

    site = _site(jobs, root, opened, clock, every)
    known_as = {name.lower() for name in (*names, socket.gethostname())}
    pages = server.PageServer(address, port, site, known_as)
    stop, signalled = server.serve_in_background(pages), _on_signal()
    click.echo(server.url(address, pages.server_port, socket.gethostname()))
    sys.stdout.flush()
    signalled.wait()
    stop()


def _warn(job: str, address: str, *, exposed: bool, rollouts: bool) -> None:
    if not exposed:
        forward, expose = "ssh -L 8420:127.0.0.1:8420 HOST", f"syncd serve {job} --host {address} --expose"
        hint = f"{forward}, or if everybody may read it: {expose}"
        raise UsageError(f"other hosts can reach {address}, and the page has no password", hint=hint)
    what = "paths, hosts and names" + (", prompts and answers" if rollouts else "")
    who = f"anyone who reaches {address} reads {what} of {job}"
    click.echo(f"warning: no password, no encryption: {who}", err=True)


def _check_jobs(jobs: Sequence[str], root: str | None, state_dir: str | None) -> None:
    from syncd.parts.page.jobs import MOST_JOBS  # noqa: PLC0415

    if (root is None) == (not jobs):
        hint = "syncd serve /ckpt/job, or syncd serve --root /ckpt"
        raise UsageError("name jobs, or a directory of jobs by --root: one of the two", hint=hint)
    if len(jobs) > MOST_JOBS:
        raise UsageError(
            f"{len(jobs)} jobs are more than {MOST_JOBS}", hint="run syncd serve twice, with two ports"
        )
    if state_dir is not None and len(jobs) != 1:
        raise UsageError("--state-dir belongs to one JOB", hint="syncd serve JOB --state-dir DIR")


def _site(
    jobs: Sequence[str], root: str | None, opened: "Callable[..., ServedJob]", clock: Clock, every: float
) -> "Site":
    """Return what is served, once everything has been polled or a moment is over."""
    from syncd.parts.page.jobs import JobSearch, JobsSite, names_of  # noqa: PLC0415

    if root is not None:
        search = JobSearch(os.path.abspath(root), opened, clock)
        _poll_once([search.poll], clock)
        return JobsSite(search.jobs, clock, every, search)
    if len(jobs) == 1:
        only = opened(jobs[0], None)
        _poll_once([only.poll], clock)
        return only.site
    named = {name: opened(path) for name, path in names_of([*map(os.path.abspath, jobs)]).items()}
    _poll_once([job.poll for job in named.values()], clock)
    return JobsSite(lambda: named, clock, every)


def _poll_once(polls: "Sequence[SharedPoll]", clock: Clock) -> None:
    """Poll once, so that a wrong job or configuration ends the command; a mount that hangs does not."""
    from syncd.parts.page.poller import poll_all  # noqa: PLC0415

    results = poll_all(polls, clock, _FIRST_POLL)
    if error := next((result.error for result in results if result.error is not None), None):
        raise error
    if any(result.document is None for result in results):
        click.echo(
            f"warning: the first reading takes longer than {_FIRST_POLL:g} s; the page says so", err=True
        )


def _on_signal() -> threading.Event:
    """Return an event that SIGTERM and Ctrl-C set from now on."""
    signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signalled.set())
    return signalled
