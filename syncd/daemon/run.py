"""The loop around the daemon's ticks: waits, signals, systemd, and the one background thread."""

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from syncd.config import DaemonConfig
from syncd.daemon.foreign import families  # noqa: F401 - for weeks: what it imports later may be another version
from syncd.daemon.service import Daemon
from syncd.daemon.wake import Mode, Pipe, Signals, Watcher
from syncd.errors import ConfigError, LockHeldError, SyncdError
from syncd.observe import names
from syncd.protocol.disk import Clock

IDLE_AFTER = 60.0
"""Seconds without news after which polling slows down to twice its interval."""

_ONCE_LIMIT = 60.0
_JOIN = 10.0


class Notifier(Protocol):
    """The service manager, as `observe.sd_notify` speaks to it."""

    def ready(self, status: str) -> None:
        """Say that the daemon has started."""

    def alive(self, status: str) -> None:
        """Say that a tick was finished."""

    def status(self, status: str) -> None:
        """Say what is going on, without a sign of life."""

    def reloading(self) -> None:
        """Say that the configuration is being read again."""

    def stopping(self) -> None:
        """Say that the daemon is about to end."""


class Background:
    """One thread for slow work; work that comes while it is busy is dropped and comes again."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=_unless_disturbed, args=(work,), name="trash", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait a while for the work in hand; what is left of it is taken up at the next start."""
        if self._thread is not None:
            self._thread.join(_JOIN)


def _unless_disturbed(work: Callable[[], None]) -> None:
    # A file system in trouble shows in the ticks; this work comes again.
    with contextlib.suppress(OSError):
        work()


def run(
    daemon: Daemon,
    clock: Clock,
    notifier: Notifier,
    load: Callable[[], DaemonConfig],
    background: Background | None = None,
) -> None:
    """Run until a signal asks to stop, or all have left and the configuration says that this is the end.

    Args:
        daemon: What ticks.
        clock: This host's clock.
        notifier: The service manager.
        load: Reads the configuration again, for SIGHUP.
        background: Where the daemon's slow work runs; waited for at the end.
    """
    pipe = Pipe()
    signals = Signals(pipe)
    watcher = Watcher(
        daemon.job.root, pipe, _mode(daemon.config), lambda: daemon.tell(names.EMITTER_REBUILT, "warning")
    )
    daemon.tell(names.WATCH_MODE, "info", mode=watcher.mode, reason=watcher.reason, mount=watcher.mount.point)
    try:
        _loop(daemon, clock, notifier, load, watcher, signals)
    finally:
        notifier.stopping()
        watcher.close()
        if background is not None:
            background.join()
        daemon.close()


def run_once(daemon: Daemon, clock: Clock, *, empty_trash: bool = False) -> None:
    """Take ticks until nothing is left that time alone would change, then release the lead.

    Args:
        daemon: What ticks.
        clock: This host's clock.
        empty_trash: Stay until what was removed is deleted, after its grace.

    Raises:
        LockHeldError: Another daemon leads the job.
        SyncdError: The tick failed.
    """
    ends = clock.monotonic() + _ONCE_LIMIT + (daemon.config.trash_grace if empty_trash else 0.0)
    try:
        while True:
            seconds = daemon.tick(woken=True)
            if daemon.error is not None:
                raise daemon.error
            if not daemon.leads:
                raise LockHeldError(
                    f"another daemon leads this job: {daemon.standing_by}",
                    path=daemon.job.root,
                    hint=f"syncd status {daemon.job.root}",
                )
            waits_for_trash = empty_trash and daemon.trash_left > 0
            if daemon.plan.publish is None and daemon.plan.due_in is None and not waits_for_trash:
                return
            if clock.monotonic() >= ends:
                return
            if daemon.plan.publish is None:
                clock.sleep(min(seconds, 0.5))
    finally:
        daemon.close()


def status_line(daemon: Daemon) -> str:
    """Return what `systemctl status` shows."""
    if daemon.error is not None:
        return f"in trouble: {daemon.error}"
    if not daemon.leads:
        return f"standing by: {daemon.standing_by}"
    version = daemon.snapshot.version
    alive = [module for module in daemon.snapshot.explorers.values() if module.alive]
    published = f"step {version.step} published" if version else "nothing published yet"
    return f"{published}, {len(alive)} explorers, lag {daemon.lag}"


def _mode(config: DaemonConfig) -> Mode | None:
    if config.watch == "events":
        return "events"
    return "polling" if config.watch == "polling" else None


def _loop(
    daemon: Daemon,
    clock: Clock,
    notifier: Notifier,
    load: Callable[[], DaemonConfig],
    watcher: Watcher,
    signals: Signals,
) -> None:
    woken, news_at, mode = True, clock.monotonic(), watcher.mode
    notifier.ready("starting")
    daemon.on_progress = lambda: _tell_manager(daemon, notifier)
    while not signals.stop:
        if signals.reload:
            signals.reload = False
            _reload(daemon, notifier, load)
        seconds = daemon.tick(woken=woken)
        if daemon.found_news:
            watcher.found_news()
            news_at = clock.monotonic()
        if watcher.mode != mode:
            mode = watcher.mode
            daemon.tell(
                names.WATCH_MODE, "warning", mode=mode, reason=watcher.reason, mount=watcher.mount.point
            )
        _tell_manager(daemon, notifier)
        if daemon.config.exit_when_left and daemon.is_left:
            return
        if watcher.mode == "polling":
            seconds = min(
                seconds, daemon.config.poll * (1 if clock.monotonic() - news_at < IDLE_AFTER else 2)
            )
        woken = watcher.wait(seconds)


def _tell_manager(daemon: Daemon, notifier: Notifier) -> None:
    if daemon.error is None:
        notifier.alive(status_line(daemon))
    else:
        notifier.status(status_line(daemon))


def _reload(daemon: Daemon, notifier: Notifier, load: Callable[[], DaemonConfig]) -> None:
    """Read the configuration again; a bad one is told and the old one stays."""
    notifier.reloading()
    try:
        daemon.reload(load())
    except (ConfigError, SyncdError) as error:
        daemon.tell(names.CONFIG_REJECTED, "error", code=error.code, detail=str(error), hint=error.hint)
    notifier.ready(status_line(daemon))
