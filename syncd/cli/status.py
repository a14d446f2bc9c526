"""`syncd status`: what is published, who follows it, and what is wrong; with or without a daemon."""

import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from syncd.cli.options import job_argument, json_option, open_job, state_dir_option
from syncd.errors import NotReadyError, SyncdError, UsageError
from syncd.protocol.disk import SystemClock
from syncd.protocol.layout import Job

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from syncd.views.look import Looker

_TERMINATED = 128 + signal.SIGTERM
_WIDE = 160
_OTHER_LINES = 16


@click.command()
@job_argument
@click.option("--watch", is_flag=True, help="Go on showing, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="With --watch: seconds between two looks.",
)
@click.option(
    "--look",
    type=click.FloatRange(0, 600),
    default=0.0,
    show_default=True,
    metavar="S",
    help="Seconds to watch heartbeats at most, to tell who lives; 6 are enough for the living.",
)
@click.option(
    "--check", is_flag=True, help="For monitoring: one line, exit 3 when the newest version is too old."
)
@click.option("--max-age", type=click.FloatRange(min=0), metavar="S", help="With --check: seconds.")
@state_dir_option
@json_option
def status(
    job: str,
    *,
    watch: bool,
    interval: float,
    look: float,
    check: bool,
    max_age: float | None,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Show what JOB has published, who follows it, what is being written, and what is wrong.

    Works without a daemon and without the right to write. One look cannot tell who lives, because clocks of
    two hosts are never compared for that: it shows the age of the last heartbeat by its writer's own clock.
    --look and --watch see heartbeats change.

    \b
    Examples:
      syncd status /ckpt/job
      syncd status /ckpt/job --watch
      syncd status /ckpt/job --check --max-age 600
      syncd status /ckpt/job --json | jq .version.step
    """
    if max_age is not None and not check:
        raise UsageError(
            "--max-age belongs to --check", hint=f"syncd status {job} --check --max-age {max_age:g}"
        )
    if check:
        _check(job, state_dir, max_age)
        return
    place = open_job(job, state_dir)
    if watch:
        _watch(place, interval, as_json=as_json)
    else:
        _show(place, look, as_json=as_json)


def _show(job: Job, seconds: float, *, as_json: bool) -> None:
    from syncd.views import data, json  # noqa: PLC0415
    from syncd.views.look import Looker  # noqa: PLC0415

    document = data.status(Looker(job, SystemClock()).settle(seconds))
    if as_json:
        click.echo(json.text(document))
    else:
        from syncd.views import table  # noqa: PLC0415

        console().print(table.status(document))


def console() -> "Console":
    """Return where tables are printed: nothing in them is markup, and pipes are not cut to 80 columns."""
    from rich.console import Console  # noqa: PLC0415

    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, width=width)


def _watch(job: Job, interval: float, *, as_json: bool) -> None:
    from syncd.views.look import Looker  # noqa: PLC0415

    # The terminal must be put right again, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    looker, clock = Looker(job, SystemClock()), SystemClock()
    try:
        if as_json:
            _watch_json(looker, clock, interval)
        else:
            _watch_table(looker, clock, interval)
    except KeyboardInterrupt:
        return


def _watch_json(looker: "Looker", clock: SystemClock, interval: float) -> None:
    from syncd.views import data, json  # noqa: PLC0415

    while True:
        click.echo(json.text(data.status(looker.look())))
        clock.sleep(interval)


def _watch_table(looker: "Looker", clock: SystemClock, interval: float) -> None:
    from rich.live import Live  # noqa: PLC0415

    where = console()
    if not where.is_terminal:
        while True:
            where.print(_frame(looker, where))
            clock.sleep(interval)
    with Live(console=where, auto_refresh=False, screen=False) as live:
        while True:
            live.update(_frame(looker, where), refresh=True)
            clock.sleep(interval)


def _frame(looker: "Looker", where: "Console") -> "RenderableType":
    """Return what is to be seen now: a job that has gone for a while does not end the view."""
    from rich.text import Text  # noqa: PLC0415

    from syncd.views import data, table  # noqa: PLC0415

    try:
        return table.status(data.status(looker.look()), max(where.height - _OTHER_LINES, 3))
    except SyncdError as error:
        return Text(f"error: {error}", "bold red")


def _check(job: str, state_dir: str | None, max_age: float | None) -> None:
    """Print one line in the form of monitoring plug-ins: SYNCD STATE - text | name=value ..."""
    from syncd.views import data  # noqa: PLC0415
    from syncd.views.look import Looker  # noqa: PLC0415

    try:
        document = data.status(Looker(open_job(job, state_dir), SystemClock()).look())
    except SyncdError as error:
        click.echo(f"SYNCD ERROR - {error}")
        sys.exit(error.exit_code)
    state, text = _judge(document, max_age)
    click.echo(f"SYNCD {state} - {text} | {_values(document, max_age)}")
    if state != "OK":
        sys.exit(NotReadyError.exit_code)


def _judge(document: dict[str, Any], max_age: float | None) -> tuple[str, str]:
    version = document["version"]
    if version is None:
        return "NOT READY", "nothing is published yet"
    text = f"version {version['generation']}.{version['step']} published {version['age']:.0f} s ago"
    if max_age is not None and version["age"] > max_age:
        return "STALE", f"{text}, more than {max_age:g} s"
    return "OK", text


def _values(document: dict[str, Any], max_age: float | None) -> str:
    version, explorers = document["version"], document["explorers"]
    lag = max((item["lag"] or 0 for item in explorers if item["alive"] is not False), default=0)
    here = sum(item["alive"] is not False for item in explorers)
    values = [f"explorers={here}", f"lag={lag}", f"bytes={document['steps']['bytes']}B"]
    if version is not None:
        limit = "" if max_age is None else f";;{max_age:g}"
        values = [f"age={version['age']:.3f}s{limit}", f"step={version['step']}", *values]
    return " ".join(values)
