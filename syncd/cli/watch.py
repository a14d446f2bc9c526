"""`syncd watch`: runs the daemon."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.config import DaemonConfig
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.owner import refuse_mirrored
from syncd.stall.calls import STUCK_AFTER, PendingCalls, TrackCall, tracked
from syncd.stall.verbs import MountVerb, pending_calls

if TYPE_CHECKING:
    from syncd.daemon.run import DaemonLoop
    from syncd.daemon.service import Daemon
    from syncd.observe.events import Observers
    from syncd.protocol.owner import MirrorSource


@click.command(cls=MountVerb, changes="anything was published or removed", only="only_once")
@job_argument
@click.option(
    "--once", "only_once", is_flag=True, help="Publish, prune and exit; exit 5 if a daemon leads the job."
)
@options.daemon_options
@options.state_dir_option
def watch(job: str, only_once: bool, state_dir: str | None, **overrides: Any) -> None:
    r"""Run the daemon of JOB: detect new steps, check them, publish versions to explorers, and prune old steps.

    One daemon leads a job. A second one stands by and takes over if the leader dies. On SIGTERM the daemon finishes
    the current step. On SIGHUP it reads its configuration again: the [daemon] table of --config, or of
    JOB/config.toml. Options override the file. After kill -9 nothing needs cleaning up.

    \b
    Exit codes:
      0   after SIGTERM; with --once after one cycle
      5   with --once: another daemon leads the job
      78  the job is a mirror of another one
      74  an operation on the mount does not return; the daemon has not released the lead

    \b
    Examples:
      syncd watch /ckpt/job
      syncd watch /ckpt/job --keep-last 3 --metrics-port 9400
      syncd watch /ckpt/foreign --state-dir /var/lib/syncd/foreign
      syncd watch /ckpt/job --once
    """
    if only_once:
        once(options.open_job(job, state_dir), overrides)
    else:
        _serve(job, state_dir, overrides)


def once(job: Job, overrides: Mapping[str, Any], *, empty_trash: bool = False) -> None:
    """Lead the job for one cycle; with `empty_trash` wait until removed steps are deleted."""
    from syncd.daemon.run import run_once  # noqa: PLC0415
    from syncd.daemon.service import Daemon  # noqa: PLC0415

    refuse_mirrored(job, "a daemon of its own")
    config, calls = options.read_config(job, overrides), pending_calls()
    job = tracked(options.with_policy(job, config), calls)
    with open_observers(job, config, calls)[0] as observers:
        daemon = Daemon(job, config, SystemClock(), observers)
        run_once(daemon, SystemClock(), empty_trash=empty_trash)


def _serve(name: str, state_dir: str | None, overrides: Mapping[str, Any]) -> None:
    with daemon_loop(name, state_dir, overrides) as (_, loop):
        loop.run()


@contextlib.contextmanager
def daemon_loop(
    name: str,
    state_dir: str | None,
    overrides: Mapping[str, Any],
    mirror_of: "MirrorSource | None" = None,
    calls: PendingCalls | None = None,
) -> "Iterator[tuple[Daemon, DaemonLoop]]":
    """Yield a daemon as a service, and the loop that runs it.

    Args:
        mirror_of: What a mirror copies into the job; None for a daemon of its own.
        calls: Where the process notes its calls of file systems; a place of the daemon's own unless given.
    """
    from syncd import __version__  # noqa: PLC0415
    from syncd.daemon.run import Background, DaemonLoop  # noqa: PLC0415
    from syncd.daemon.service import Daemon  # noqa: PLC0415
    from syncd.daemon.watchdog import Watchdog  # noqa: PLC0415
    from syncd.observe import event_names  # noqa: PLC0415
    from syncd.observe.sd_notify import Notifier, watchdog_interval  # noqa: PLC0415
    from syncd.stall import host_state  # noqa: PLC0415
    from syncd.stall.worker import StallGuard  # noqa: PLC0415

    clock, background = SystemClock(), Background()
    calls = calls or PendingCalls(clock)
    # Until the daemon runs, nothing reports a mount that does not answer: it ends this command.
    bounded = StallGuard(calls, clock, STUCK_AFTER)
    opened = bounded(lambda: options.open_job(name, state_dir, calls))
    if mirror_of is None:
        bounded(lambda: refuse_mirrored(opened, "a daemon of its own"))

    def load() -> DaemonConfig:
        with calls("read", f"{opened.root}/config.toml"):
            return options.read_config(opened, overrides)

    # Asked before the file is read: one that comes in between is read again.
    awaits_config = overrides.get("config") is None and not bounded(lambda: options.has_config(opened))
    config = bounded(load)
    job = tracked(options.with_policy(opened, config), calls)
    heard, aside = open_observers(job, config, calls)
    with heard as observers:
        daemon = Daemon(job, config, clock, observers, background, mirror_of=mirror_of)
        daemon.report(event_names.DAEMON_STARTED, "info", job=job.root, state=job.state, version=__version__)
        keeper = host_state.Writer(job.root, os.path.abspath(name))
        watchdog = Watchdog(clock, calls, aside, keeper, watchdog_interval())
        yield (
            daemon,
            DaemonLoop(daemon, clock, Notifier(), load, watchdog, background, awaits_config=awaits_config),
        )


def open_observers(job: Job, config: DaemonConfig, attend: TrackCall) -> "tuple[Observers, Observers]":
    """Return the observers of the daemon, and those of them that write nothing to the job's mount."""
    from syncd.observe.events import Observers  # noqa: PLC0415
    from syncd.observe.journal import Journal  # noqa: PLC0415

    aside = open_log_and_metrics(job, config)
    journal = Journal(job.events, config.events_bytes, adopt=job.disk.adopt, attend=attend)
    return Observers(aside, journal), aside


def open_log_and_metrics(job: Job, config: DaemonConfig) -> "Observers":
    """Return the observers that write nothing to the job's mount: the log on stderr, and metrics if configured."""
    from syncd.observe import log  # noqa: PLC0415
    from syncd.observe.events import Observer, Observers  # noqa: PLC0415

    log.configure(
        config.log_level,
        sys.stderr,
        json=None if config.log_format == "auto" else config.log_format == "json",
    )
    heard: list[Observer] = [log.LogObserver()]
    if config.metrics_port or config.metrics_textfile:
        from syncd.observe.metrics import Metrics  # noqa: PLC0415

        heard.append(
            Metrics.start(config.metrics_port, config.metrics_host, config.metrics_textfile, job.root)
        )
    return Observers(*heard)
