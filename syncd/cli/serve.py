"""`syncd serve`: one live page about a job."""

import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from syncd.cli.options import job_argument, open_job, state_dir_option
from syncd.cli.policies import policy_options, read_config
from syncd.errors import UsageError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock

if TYPE_CHECKING:
    from syncd.daemon.policy import Policy
    from syncd.dashboard.watching import Watching

_FIRST_LOOK = 5.0
_PATIENCE = 2.0


@click.command()
@job_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8420,
    show_default=True,
    help="Port; 0 takes a free one. The first line printed says where the page is.",
)
@click.option(
    "--expose",
    is_flag=True,
    help="Needed with a --host that others reach: there is no password, whoever reaches it reads all of it.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="A name by which browsers ask for the page, such as that of a proxy; may be given several times.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.5, 3600),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks at the job, while somebody watches.",
)
@policy_options
@state_dir_option
def serve(
    job: str,
    *,
    host: str,
    port: int,
    expose: bool,
    names: tuple[str, ...],
    every: float,
    state_dir: str | None,
    **policy: Any,
) -> None:
    r"""Serve one live page about JOB: trainer, versions, shards, explorers, disk, and why each step stays or goes.

    Needs no daemon and no right to write. It listens on this host only; from elsewhere, bring the port over:
    ssh -L 8420:127.0.0.1:8420 HOST. The policy is found as `syncd ls` finds it. Ends with 0 after SIGTERM or Ctrl-C.

    \b
    Examples:
      syncd serve /ckpt/job
      syncd serve /ckpt/job --port 0
      curl -s http://127.0.0.1:8420/data.json | jq .status.version.step
    """
    from syncd.dashboard import document, hosts  # noqa: PLC0415
    from syncd.dashboard.pages import Site  # noqa: PLC0415
    from syncd.dashboard.server import Server, serve_in_background  # noqa: PLC0415
    from syncd.dashboard.sight import Sight  # noqa: PLC0415
    from syncd.dashboard.watching import Watching  # noqa: PLC0415
    from syncd.views import json  # noqa: PLC0415

    address = hosts.address_of(host)
    if not hosts.is_loopback(address):
        _warn(job, address, exposed=expose)

    clock = SystemClock()
    sight = Sight(lambda: open_job(job, state_dir), lambda place: _rules(place, policy), clock)
    watching = Watching(sight, clock, every)
    known_as = {name.lower() for name in (*names, socket.gethostname())}
    site = Site(lambda: json.text(document.answer(watching.current(_PATIENCE), every)))
    server = Server(address, port, site, known_as)
    _look_once(watching)
    stop = serve_in_background(server)
    click.echo(hosts.url(address, server.server_port, socket.gethostname()))
    sys.stdout.flush()
    _until_told()
    watching.close()
    stop()


def _rules(job: Job, given: dict[str, Any]) -> "Policy":
    from syncd.daemon.policy import policy_of  # noqa: PLC0415

    return policy_of(read_config(job, given))


def _warn(job: str, address: str, *, exposed: bool) -> None:
    """Say what it means to be reached by others.

    Raises:
        UsageError: That was not asked for.
    """
    if not exposed:
        raise UsageError(
            f"{address} is reached from other hosts, and the page has no password",
            hint=f"ssh -L 8420:127.0.0.1:8420 HOST, or if all may read it: "
            f"syncd serve {job} --host {address} --expose",
        )
    click.echo(
        f"warning: no password and no encryption: whoever reaches {address} reads paths, hosts and names of {job}",
        err=True,
    )


def _look_once(watching: "Watching") -> None:
    """Take the first look, so that what is wrong with the command ends it; a mount that hangs does not.

    Raises:
        SyncdError: The job is not there, or its configuration is wrong.
    """
    watching.start()
    known = watching.current(_FIRST_LOOK)
    if known.error is not None:
        raise known.error
    if known.document is None:
        click.echo(f"warning: the first look takes longer than {_FIRST_LOOK:g} s; the page says so", err=True)


def _until_told() -> None:
    """Wait for SIGTERM or Ctrl-C."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    told.wait()
