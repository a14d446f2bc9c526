"""`syncd status`: what is published, who follows it, and what is wrong; with or without a daemon."""

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Literal

import click

from syncd.cli.options import job_argument, json_option, open_job, state_dir_option
from syncd.errors import NotReadyError, StuckError, SyncdError, UsageError
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import STUCK_AFTER, InHand

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
@click.option(
    "--patience",
    type=click.FloatRange(0.1, 600),
    default=STUCK_AFTER,
    show_default=True,
    metavar="S",
    help="Seconds that one operation on the mount may take before what is known elsewhere is shown.",
)
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
    patience: float,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Show what JOB has published, who follows it, what is being written, and what is wrong.

    Works without a daemon and without the right to write. One look cannot tell who lives, because clocks of
    two hosts are never compared for that: it shows the age of the last heartbeat by its writer's own clock.
    --look and --watch see heartbeats change.

    A mount that does not answer is not waited for: what a daemon of this host said at last is shown, exit 74.

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
    sight = _Sight(job, state_dir, patience)
    if check:
        _check(sight, max_age)
    elif watch:
        _watch(sight, interval, as_json=as_json)
    else:
        _show(sight, look, as_json=as_json)


class _Sight:
    """Looks at a job whose mount may not answer.

    Args:
        job: The job directory, as it was given.
        state_dir: The state directory, as it was given.
        patience: Seconds that one operation on the mount may take.
    """

    def __init__(self, job: str, state_dir: str | None, patience: float) -> None:
        from syncd.stall.views import Attended  # noqa: PLC0415

        self.job, self._state_dir = job, state_dir
        self.clock = SystemClock()
        self._in_hand = InHand(self.clock)
        self._attended = Attended(self._in_hand, self.clock, patience)
        self._looker: Looker | None = None

    def look(self, settle: float = 0.0) -> dict[str, Any]:
        """Return the document of one look.

        Args:
            settle: Seconds to watch heartbeats at most.

        Raises:
            StuckError: The mount does not answer.
        """
        from syncd.views import data  # noqa: PLC0415

        return data.status(self._attended(lambda: self._open().settle(settle)))

    def known(self) -> dict[str, Any]:
        """Return what is known without asking the mount."""
        from syncd.stall import hostfile  # noqa: PLC0415
        from syncd.views import data  # noqa: PLC0415

        return data.known(hostfile.find(self.job), os.path.abspath(self.job), self.clock.time())

    def _open(self) -> "Looker":
        from syncd.views.look import Looker  # noqa: PLC0415

        if self._looker is None:
            place = open_job(self.job, self._state_dir, self._in_hand)
            with self._in_hand("find", place.root):
                self._looker = Looker(place, self.clock)
        return self._looker


def _show(sight: _Sight, seconds: float, *, as_json: bool) -> None:
    try:
        document = sight.look(seconds)
    except StuckError:
        _show_known(sight, as_json=as_json)
        raise
    _print(document, "status", as_json=as_json)


def _show_known(sight: _Sight, *, as_json: bool) -> None:
    _print(sight.known(), "known", as_json=as_json)


def _print(document: dict[str, Any], kind: Literal["status", "known"], *, as_json: bool) -> None:
    if as_json:
        from syncd.views import json  # noqa: PLC0415

        click.echo(json.text(document))
    else:
        from syncd.views import table  # noqa: PLC0415

        console().print(table.status(document) if kind == "status" else table.known(document))


def console() -> "Console":
    """Return where tables are printed: nothing in them is markup, and pipes are not cut to 80 columns."""
    from rich.console import Console  # noqa: PLC0415

    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, width=width)


def _watch(sight: _Sight, interval: float, *, as_json: bool) -> None:
    # The terminal must be put right again, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        if as_json:
            _watch_json(sight, interval)
        else:
            _watch_table(sight, interval)
    except KeyboardInterrupt:
        return


def _watch_json(sight: _Sight, interval: float) -> None:
    from syncd.views import json  # noqa: PLC0415

    while True:
        try:
            document = sight.look()
        except StuckError:
            document = sight.known()
        click.echo(json.text(document))
        sight.clock.sleep(interval)


def _watch_table(sight: _Sight, interval: float) -> None:
    from rich.live import Live  # noqa: PLC0415

    _look_first(sight)
    where = console()
    if not where.is_terminal:
        while True:
            where.print(_frame(sight, where))
            sight.clock.sleep(interval)
    with Live(console=where, auto_refresh=False, screen=False) as live:
        while True:
            live.update(_frame(sight, where), refresh=True)
            sight.clock.sleep(interval)


def _look_first(sight: _Sight) -> None:
    """Say at once that there is no such job; a mount that does not answer may yet do so."""
    with contextlib.suppress(StuckError):
        sight.look()


def _frame(sight: _Sight, where: "Console") -> "RenderableType":
    """Return what is to be seen now: a job that has gone for a while does not end the view."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from syncd.views import table  # noqa: PLC0415

    try:
        return table.status(sight.look(), max(where.height - _OTHER_LINES, 3))
    except StuckError as error:
        return Group(table.known(sight.known()), Text(f"error: {error}", "bold red"))
    except SyncdError as error:
        return Text(f"error: {error}", "bold red")


def _check(sight: _Sight, max_age: float | None) -> None:
    """Print one line in the form of monitoring plug-ins: SYNCD STATE - text | name=value ..."""
    try:
        document = sight.look()
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
