"""`syncd serve`: serves one live page about a job."""

import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.errors import UsageError
from syncd.protocol.local_disk import SystemClock

if TYPE_CHECKING:
    from syncd.dashboard.poller import SharedPoll

_FIRST_POLL = 5.0
_PATIENCE = 2.0


@click.command()
@job_argument
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
@options.policy_options
@options.state_dir_option
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

    Needs no daemon and no write permission. It listens on this host only; to see it from elsewhere, forward the port:
    ssh -L 8420:127.0.0.1:8420 HOST. The policy is found as `syncd ls` finds it. Exits 0 on SIGTERM and Ctrl-C.

    \b
    Examples:
      syncd serve /ckpt/job
      syncd serve /ckpt/job --port 0
      curl -s http://127.0.0.1:8420/data.json | jq .status.version.step
    """
    from syncd.dashboard import document, server  # noqa: PLC0415
    from syncd.dashboard.document import PageReader  # noqa: PLC0415
    from syncd.dashboard.poller import SharedPoll  # noqa: PLC0415
    from syncd.views.data import STATUS_SCHEMA  # noqa: PLC0415

    address = server.address_of(host)
    if not server.is_loopback(address):
        _warn(job, address, exposed=expose)

    clock = SystemClock()
    reader = PageReader(
        lambda: options.open_job(job, state_dir),
        lambda place: options.read_config(place, policy),
        clock,
    )
    poll = SharedPoll(reader, clock, every)
    known_as = {name.lower() for name in (*names, socket.gethostname())}
    site = server.Site(
        lambda: options.json_text(document.answer(poll.current(_PATIENCE), every), STATUS_SCHEMA)
    )
    pages = server.PageServer(address, port, site, known_as)
    _poll_once(poll)
    stop, signalled = server.serve_in_background(pages), _on_signal()
    click.echo(server.url(address, pages.server_port, socket.gethostname()))
    sys.stdout.flush()
    signalled.wait()
    stop()


def _warn(job: str, address: str, *, exposed: bool) -> None:
    """Warn that others can reach the page.

    Raises:
        UsageError: `--expose` was not given.
    """
    if not exposed:
        forward, expose = "ssh -L 8420:127.0.0.1:8420 HOST", f"syncd serve {job} --host {address} --expose"
        hint = f"{forward}, or if everybody may read it: {expose}"
        raise UsageError(f"other hosts can reach {address}, and the page has no password", hint=hint)
    who = f"anyone who reaches {address} reads paths, hosts and names of {job}"
    click.echo(f"warning: no password, no encryption: {who}", err=True)


def _poll_once(poll: "SharedPoll") -> None:
    """Poll once, so that a wrong job or configuration ends the command; a mount that hangs does not.

    Raises:
        SyncdError: The job is not there, or its configuration is wrong.
    """
    known = poll.current(_FIRST_POLL)
    if known.error is not None:
        raise known.error
    if known.document is None:
        click.echo(
            f"warning: the first reading takes longer than {_FIRST_POLL:g} s; the page says so", err=True
        )


def _on_signal() -> threading.Event:
    """Return an event that SIGTERM and Ctrl-C set from now on."""
    signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signalled.set())
    return signalled
