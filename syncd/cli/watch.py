"""`syncd watch`: the daemon."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from syncd.cli.options import job_argument, open_job, state_dir_option
from syncd.cli.policies import daemon_options, read_config, with_policy
from syncd.config import DaemonConfig
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import STUCK_AFTER, Attend, InHand, attended, unattended
from syncd.stall.verbs import Attended, noted

if TYPE_CHECKING:
    from syncd.observe.events import Observers


def _is_once(given: Mapping[str, Any]) -> bool:
    return bool(given["only_once"])


@click.command(cls=Attended, acts="anything was published or removed", option=False, when=_is_once)
@job_argument
@click.option("--once", "only_once", is_flag=True, help="Publish, prune and end; exit 5 when a daemon leads.")
@daemon_options
@state_dir_option
def watch(job: str, only_once: bool, state_dir: str | None, **given: Any) -> None:
    r"""Watch JOB: notice new steps, verify them, publish versions to explorers, and prune.

    One daemon leads a job; a second one stands by and takes over. SIGTERM finishes the step in hand and exits 0,
    or 74 when the mount does not answer; SIGHUP reads the configuration again. Settings come from the [daemon]
    table of --config or JOB/config.toml.

    \b
    Examples:
      syncd watch /ckpt/job
      syncd watch /ckpt/job --keep-last 3 --metrics-port 9400
      syncd watch /ckpt/foreign --state-dir /var/lib/syncd/foreign
      syncd watch /ckpt/job --once
    """
    if only_once:
        once(open_job(job, state_dir), given)
    else:
        _serve(job, state_dir, given)


def once(job: Job, given: Mapping[str, Any], *, empty_trash: bool = False) -> None:
    """Lead the job for one cycle.

    Args:
        job: The job.
        given: What overrides the configuration.
        empty_trash: Wait until what was removed is deleted.

    Raises:
        LockHeldError: A daemon leads it.
    """
    from syncd.daemon.run import run_once  # noqa: PLC0415
    from syncd.daemon.service import Daemon  # noqa: PLC0415

    config, in_hand = read_config(job, given), noted()
    job = attended(with_policy(job, config), in_hand)
    with _observers(job, config, in_hand).all as observers:
        daemon = Daemon(job, config, SystemClock(), observers)
        run_once(daemon, SystemClock(), empty_trash=empty_trash)


def _serve(name: str, state_dir: str | None, given: Mapping[str, Any]) -> None:
    from syncd import __version__  # noqa: PLC0415
    from syncd.daemon.run import Background, run  # noqa: PLC0415
    from syncd.daemon.service import Daemon  # noqa: PLC0415
    from syncd.daemon.watchdog import Attendance  # noqa: PLC0415
    from syncd.observe import names  # noqa: PLC0415
    from syncd.observe.sd_notify import Notifier, watchdog_interval  # noqa: PLC0415
    from syncd.stall import hostfile  # noqa: PLC0415
    from syncd.stall.views import Attended as Bounded  # noqa: PLC0415

    clock, background = SystemClock(), Background()
    in_hand = InHand(clock)
    # Nobody attends to it yet, and without its configuration it cannot be told how: a dead mount ends it.
    bounded = Bounded(in_hand, clock, STUCK_AFTER)
    place = bounded(lambda: open_job(name, state_dir, in_hand))

    def load() -> DaemonConfig:
        with in_hand("read", f"{place.root}/config.toml"):
            return read_config(place, given)

    config = bounded(load)
    job = attended(with_policy(place, config), in_hand)
    heard = _observers(job, config, in_hand)
    with heard.all as observers:
        daemon = Daemon(job, config, clock, observers, background)
        daemon.tell(names.DAEMON_STARTED, "info", job=job.root, state=job.state, version=__version__)
        keeper = hostfile.Writer(job.root, os.path.abspath(name))
        attendance = Attendance(clock, in_hand, heard.aside, keeper, watchdog_interval())
        run(daemon, clock, Notifier(), load, attendance, background)


class _Heard(NamedTuple):
    """What hears the daemon, and the part of it that has nothing on the job's mount."""

    all: "Observers"
    aside: "Observers"


def _observers(job: Job, config: DaemonConfig, attend: Attend = unattended) -> _Heard:
    """Return what hears the daemon: the log on stderr, the job's journal, and metrics where they are asked for."""
    from syncd.observe import log  # noqa: PLC0415
    from syncd.observe.events import Observer, Observers  # noqa: PLC0415
    from syncd.observe.journal import Journal  # noqa: PLC0415

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
    aside = Observers(*heard)
    journal = Journal(job.events, config.events_bytes, adopt=job.disk.adopt, attend=attend)
    return _Heard(Observers(aside, journal), aside)
