"""`syncd status`: shows what is published, who follows it, and what is wrong; with or without a daemon."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.config import DaemonConfig
from syncd.errors import ConfigError, StorageError, StuckError, SyncdError, UsageError, storage_error
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import STUCK_AFTER, PendingCalls

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from syncd.views.check import CheckLimits
    from syncd.views.job_view import JobViewer

_OTHER_LINES = 17
_LINES_OF_A_PROBLEM = 2


class _StatusCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the line; with --check an error ends as UNKNOWN, because 2 would mean critical."""
        is_check = "--check" in args and not ctx.resilient_parsing
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if not is_check:
                raise
            from syncd.views.check import CheckResult, CheckState  # noqa: PLC0415

            click.echo(CheckResult(CheckState.UNKNOWN, error.format_message()))
            ctx.exit(CheckState.UNKNOWN)


@click.command(cls=_StatusCommand)
@job_argument
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@options.seconds_option("--interval", "With --watch: refresh after this many seconds.", 1.0, 0.2, 3600)
@options.seconds_option(
    "--look",
    "Watch heartbeats for up to this many seconds, to tell who is alive; 6 are enough.",
    0.0,
    most=600,
)
@click.option(
    "--check",
    is_flag=True,
    help="For monitoring: print one line; exit 0 OK, 1 warning, 2 critical, 3 unknown.",
)
@options.seconds_option("--warn-age", "With --check: warn if the newest version is older than this.")
@options.seconds_option("--max-age", "With --check: critical if the newest version is older than this.")
@options.seconds_option(
    "--patience",
    "When one operation takes longer than this many seconds, show what a daemon of this host reported last.",
    STUCK_AFTER,
    0.1,
    600,
)
@options.state_dir_option
@options.json_option
def status(
    job: str,
    *,
    watch: bool,
    interval: float,
    look: float,
    check: bool,
    warn_age: float | None,
    max_age: float | None,
    patience: float,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Show what JOB has published, who follows it, what is being written, and what is wrong.

    Needs neither a daemon nor write permission. Clocks of different hosts are never compared, so one reading cannot
    tell who is alive: it shows the age of each heartbeat by its writer's clock. --look and --watch see whether
    heartbeats change. If the mount does not answer, the command shows what a daemon of this host reported last.

    \b
    Exit codes:
      0   shown, whatever is wrong; with --check: OK
      1   with --check: warning
      2   with --check: critical
      3   with --check: unknown
      74  the mount does not answer, or there is no such job

    \b
    Examples:
      syncd status /ckpt/job
      syncd status /ckpt/job --watch
      syncd status /ckpt/job --check --max-age 600
      syncd status /ckpt/job --json | jq .version.step
    """
    for name, age in (("--warn-age", warn_age), ("--max-age", max_age)):
        if age is not None and not check:
            raise UsageError(f"{name} belongs to --check", hint=f"syncd status {job} --check {name} {age:g}")
    source = _StatusSource(job, state_dir, patience)
    if check:
        from syncd.views.check import CheckLimits  # noqa: PLC0415

        _check(source, look, CheckLimits(warn_age, max_age))
    elif watch:
        _watch(source, interval, as_json=as_json)
    else:
        _show(source, look, as_json=as_json)


class _StatusSource:
    """Reads the status of a job whose mount may not answer; one operation on it may take `patience` seconds."""

    def __init__(self, job: str, state_dir: str | None, patience: float) -> None:
        from syncd.stall.worker import StallGuard  # noqa: PLC0415

        self.job, self._state_dir = job, state_dir
        self.clock = SystemClock()
        self._calls = PendingCalls(self.clock)
        self._guard = StallGuard(self._calls, self.clock, patience)
        self._viewer: JobViewer | None = None

    def read(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the status document; watch heartbeats for `seconds` at most."""
        from syncd.views import documents  # noqa: PLC0415

        return documents.status(self._guard(lambda: self._open().read_until_known(seconds)))

    def last_report(self) -> dict[str, Any]:
        """Return what the daemons of this host reported last, without asking the mount."""
        from syncd.stall import host_state  # noqa: PLC0415
        from syncd.views import documents  # noqa: PLC0415

        return documents.last_report(host_state.find(self.job), os.path.abspath(self.job), self.clock.time())

    def _open(self) -> "JobViewer":
        from syncd.views.job_view import JobViewer  # noqa: PLC0415

        if self._viewer is None:
            opened = options.open_job(self.job, self._state_dir, self._calls)
            with self._calls("find", opened.root):
                daemon = _daemon_config(opened)
                self._viewer = JobViewer(opened, self.clock, daemon.ttl, daemon.takeover)
        return self._viewer


def _daemon_config(job: Job) -> DaemonConfig:
    """Return the job's `[daemon]` table; the defaults if it is not usable, because a job is shown all the same."""
    try:
        return options.read_config(job, {})
    except (ConfigError, StorageError):
        return DaemonConfig()


def _show(source: _StatusSource, seconds: float, *, as_json: bool) -> None:
    try:
        document = source.read(seconds)
    except StuckError:
        _print(source.last_report(), as_json=as_json)
        raise
    _print(document, as_json=as_json)


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(document)
    else:
        from syncd.views import table  # noqa: PLC0415

        table.console().print(table.last_report(document) if "known" in document else table.status(document))


def _watch(source: _StatusSource, interval: float, *, as_json: bool) -> None:
    options.exit_on_sigterm()
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        refresh = partial(_refresh_json, source) if as_json else stack.enter_context(_table_view(source))
        while True:
            refresh()
            source.clock.sleep(interval)


def _refresh_json(source: _StatusSource) -> None:
    try:
        document = source.read()
    except StuckError:
        document = source.last_report()
    _print_json(document)


def _print_json(document: dict[str, Any]) -> None:
    from syncd.views.documents import STATUS_SCHEMA  # noqa: PLC0415

    options.print_json(document, STATUS_SCHEMA)


@contextlib.contextmanager
def _table_view(source: _StatusSource) -> Iterator[Callable[[], None]]:
    from rich.live import Live  # noqa: PLC0415

    from syncd.views import table  # noqa: PLC0415

    # Raise at once if there is no such job; a mount that does not answer is shown instead.
    with contextlib.suppress(StuckError):
        source.read()
    where = table.console()
    if where.is_terminal:
        with Live(console=where, auto_refresh=False, screen=False) as live:
            yield lambda: live.update(_frame(source, where), refresh=True)
    else:
        yield lambda: where.print(_frame(source, where))


def _frame(source: _StatusSource, where: "Console") -> "RenderableType":
    """Return what to show now; a job that is away for a while does not end the view."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from syncd.views import table  # noqa: PLC0415

    try:
        document = source.read()
        others = _OTHER_LINES + _LINES_OF_A_PROBLEM * len(document["problem_groups"])
        return table.status(document, max(where.height - others, 3), problems_first=where.is_terminal)
    except StuckError as error:
        return Group(table.last_report(source.last_report()), Text(f"error: {error}", "bold red"))
    except SyncdError as error:
        return Text(f"error: {error}", "bold red")


def _check(source: _StatusSource, seconds: float, limits: "CheckLimits") -> None:
    """Print one line in the form of monitoring plug-ins, and exit with the code of its state."""
    from syncd.views.check import check, check_failed  # noqa: PLC0415

    try:
        result = check(source.read(seconds), limits)
    except SyncdError as error:
        result = check_failed(error)
    except OSError as error:
        result = check_failed(storage_error(error, source.job))
    click.echo(result)
    click.get_current_context().exit(result.state)
