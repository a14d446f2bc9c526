"""The loop around the daemon's ticks: one thread works, another waits for signals and reports."""

import contextlib
import shlex
import threading
from collections.abc import Callable
from typing import cast

from syncd.config import DaemonConfig
from syncd.daemon.foreign import frameworks  # noqa: F401 - at start: by the time of a late import syncd may have been upgraded
from syncd.daemon.service import Daemon
from syncd.daemon.snapshot import living
from syncd.daemon.wake import Mode, Signals, WakePipe, Watcher
from syncd.daemon.watchdog import Watchdog
from syncd.errors import ConfigError, LockHeldError, StorageError, SyncdError
from syncd.observe import event_names
from syncd.observe.sd_notify import Notifier
from syncd.protocol.disk import Clock, exists
from syncd.protocol.entry_problem import EntryProblem
from syncd.protocol.layout import CONFIG
from syncd.protocol.leadership import BEAT
from syncd.protocol.mount import CROWDED, PATIENT, MountState
from syncd.stall.worker import WorkerThread

IDLE_AFTER = 60.0  # seconds without news after which polling slows down to twice its interval

_ONCE_LIMIT = 60.0
_ROOM_ROUNDS, _ROOM_PAUSE = 3, 0.15
_JOIN = 10.0


class Background:
    """One thread for slow work; work that comes while it is busy is dropped, and comes again."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=_unless_disturbed, args=(work,), name="trash", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait a while for the current work; the next start resumes what is left of it."""
        if self._thread is not None:
            self._thread.join(_JOIN)


def _unless_disturbed(work: Callable[[], None]) -> None:
    # A failing file system shows in the ticks, and this work comes again.
    with contextlib.suppress(OSError):
        work()


class DaemonLoop:
    """Runs a daemon: one thread ticks and waits; this one receives signals and reports, whatever the mount does.

    Args:
        load: Reads the configuration again, for SIGHUP.
        watchdog: Reports what does not return, in this thread.
        background: Where the daemon's slow work runs; waited for at the end.
        awaits_config: Also read it once the job has its file: a daemon may start before the trainer that writes it.
    """

    def __init__(
        self,
        daemon: Daemon,
        clock: Clock,
        manager: Notifier,
        load: Callable[[], DaemonConfig],
        watchdog: Watchdog,
        background: Background,
        *,
        awaits_config: bool = False,
    ) -> None:
        self._daemon, self._clock, self._manager, self._load = daemon, clock, manager, load
        self._watchdog, self._background = watchdog, background
        self._reported, self._woken = WakePipe(), WakePipe()
        self._signals = Signals(self._reported, self._woken)
        self._news_at = clock.monotonic()
        self._mode = ""
        self._awaits_config, self._rejected = awaits_config, ""

    def wake(self) -> None:
        """Have the daemon tick now; any thread may call it."""
        self._woken.ring()

    def stop(self) -> None:
        """Ask the daemon to end, as a signal does; any thread may call it."""
        self._signals.stop = True
        self._reported.ring()
        self._woken.ring()

    def run(self) -> None:
        """Run until a signal asks to stop, or until all modules have left if the configuration says so.

        Raises:
            ConfigError: The job or its state directory is not for this daemon.
        """
        worker = WorkerThread(self._work, "daemon", self._reported.ring)
        self._manager.ready("starting")
        worker.start()
        self._watch_over(worker)
        worker.result()
        self._watchdog.close()

    def _watch_over(self, worker: WorkerThread[None]) -> None:
        asked: float | None = None
        while worker.is_running:
            self._reported.wait(self._watchdog.every)
            status = status_line(self._daemon)
            stuck = self._watchdog.check(self._daemon, status)
            if self._signals.stop and asked is None:
                asked = self._clock.monotonic()
                self._manager.stopping()
            if asked is not None:
                self._watchdog.check_stop(worker.identity, asked)
            elif stuck is not None:
                # It is known and reported: a restarted daemon would know nothing, and be no less stuck.
                self._manager.alive(f"stuck: {stuck}; {status}")

    # --- in the thread that works ---------------------------------------------------------------------------------

    def _work(self) -> None:
        daemon = self._daemon
        watcher = Watcher(
            daemon.job,
            self._clock,
            self._woken,
            None if daemon.config.watch == "auto" else cast("Mode", daemon.config.watch),
            lambda: daemon.report(event_names.EMITTER_REBUILT, "warning"),
            self._watchdog.in_hand,
        )
        try:
            self._tick_until_stopped(watcher)
        finally:
            watcher.close()
            self._background.join()
            daemon.close()

    def _tick_until_stopped(self, watcher: Watcher) -> None:
        daemon, woken = self._daemon, True
        daemon.on_progress(self._notify)
        while not self._signals.stop:
            self._report_mode(watcher)
            if self._signals.reload or self._has_config_now():
                self._signals.reload = False
                self._reload()
            seconds = daemon.tick(woken=woken)
            if isinstance(daemon.error, ConfigError):
                raise daemon.error  # what only a person can mend: another job's state, a later protocol
            if daemon.found_news:
                watcher.found_news()
                self._news_at = self._clock.monotonic()
            if watcher.mode == "polling":
                watcher.note_unpublished(daemon.snapshot.unpublished)
            self._report_past()
            self._notify()
            if daemon.config.exit_when_left and daemon.is_left:
                return
            woken = watcher.wait(self._pause(watcher, seconds))

    def _pause(self, watcher: Watcher, seconds: float) -> float:
        if watcher.mode != "polling":
            return seconds
        idle = self._clock.monotonic() - self._news_at >= IDLE_AFTER
        return min(seconds, self._daemon.config.poll * (2 if idle else 1))

    def _report_mode(self, watcher: Watcher) -> None:
        if watcher.mode != self._mode:
            changed, self._mode = self._mode != "", watcher.mode
            self._daemon.report(
                event_names.WATCH_MODE_SELECTED,
                "warning" if changed else "info",
                mode=watcher.mode,
                reason=watcher.reason,
                mount=watcher.mount.point,
            )

    def _report_past(self) -> None:
        past = self._watchdog.pop_past()
        if past is not None:
            trouble = self._daemon.trouble
            state = trouble.state if trouble else MountState.OK
            self._daemon.report(
                event_names.MOUNT_STATE_CHANGED,
                "warning",
                state=state,
                detail=f"{past.call} returned after {past.seconds:.0f} s",
                seconds=round(past.seconds, 1),
            )

    def _notify(self) -> None:
        # The daemon waits for what a restart would not repair: it is known and reported.
        daemon, manager = self._daemon, self._manager
        if daemon.error is None or (daemon.trouble is not None and daemon.trouble.state in PATIENT):
            manager.alive(status_line(daemon))
        else:
            manager.status(status_line(daemon))

    def _has_config_now(self) -> bool:
        """Return whether the job's file of configuration is there, where it is awaited."""
        job = self._daemon.job
        with contextlib.suppress(OSError):  # the tick reports it
            return self._awaits_config and exists(job.disk, f"{job.root}/{CONFIG}")
        return False

    def _reload(self) -> None:
        daemon = self._daemon
        self._manager.reloading()
        is_there = self._has_config_now()
        try:
            daemon.reload(self._load())
            # Until it was read it is awaited: so long the daemon prunes by the defaults.
            self._awaits_config &= not is_there
        except SyncdError as error:
            self._report_rejected(error)
        self._manager.ready(status_line(daemon))

    def _report_rejected(self, error: SyncdError) -> None:
        """Report why the new configuration is not used; while it is awaited, each reason once."""
        is_known, self._rejected = self._awaits_config and self._rejected == str(error), str(error)
        if not is_known:
            fields = {"code": error.code, "detail": str(error), "hint": error.hint}
            self._daemon.report(event_names.CONFIG_REJECTED, "error", **fields)


def run_once(daemon: Daemon, clock: Clock, *, empty_trash: bool = False) -> None:
    """Tick until nothing is left that time alone would change, then release the lead.

    It waits at most `takeover` seconds to learn whether a silent leader lives.

    Args:
        empty_trash: Stay until what was removed is deleted, after its grace.
    """
    led_until = clock.monotonic() + daemon.config.takeover + BEAT
    rounds_for_room = _ROOM_ROUNDS
    ends = clock.monotonic() + _ONCE_LIMIT + (daemon.config.trash_grace if empty_trash else 0.0)
    try:
        while True:
            seconds = daemon.tick(woken=True)
            if daemon.error is not None:
                if rounds_for_room and daemon.trouble is not None and daemon.trouble.state in CROWDED:
                    # A full disk may have room once what earlier daemons have removed is deleted.
                    rounds_for_room -= 1
                    clock.sleep(min(seconds, _ROOM_PAUSE))
                    continue
                raise daemon.error
            if not daemon.leads:
                # One reading cannot tell a dead leader of another host from one between two heartbeats.
                if not daemon.leader.is_surely_led and clock.monotonic() < led_until:
                    clock.sleep(min(seconds, 0.5))
                    continue
                raise LockHeldError(
                    f"another daemon leads this job: {daemon.leader.standing_by}",
                    path=daemon.job.root,
                    hint=f"syncd status {daemon.job.root}",
                )
            waits_for_trash = empty_trash and daemon.removals.trash_left > 0
            is_done = daemon.plan.publish is None and daemon.plan.due_in is None and not waits_for_trash
            if is_done or clock.monotonic() >= ends:
                _require_version_read(daemon)
                _require_no_entry_problem(daemon.removals.entry_problem)
                return
            if daemon.plan.publish is None:
                clock.sleep(min(seconds, 0.5))
    finally:
        daemon.close()


def _require_version_read(daemon: Daemon) -> None:
    if daemon.snapshot.version_unread:
        path = daemon.job.version
        message = f"the published version is unknown: {daemon.snapshot.version_problem}"
        raise StorageError(message, path=path, hint=f"ls -l {shlex.quote(path)}")


def _require_no_entry_problem(entry_problem: EntryProblem | None) -> None:
    if entry_problem is not None:
        message = f"it cannot be moved or removed: {entry_problem.message} ({entry_problem.owner})"
        raise StorageError(message, path=entry_problem.path, hint=entry_problem.hint)


def status_line(daemon: Daemon) -> str:
    """Return what `systemctl status` shows."""
    if daemon.error is not None:
        state = f"{daemon.trouble.state}: " if daemon.trouble else ""
        return f"in trouble: {state}{daemon.error}"
    if not daemon.leads:
        return f"standing by: {daemon.leader.standing_by}"
    version = daemon.snapshot.version
    published = f"step {version.step} published" if version else "nothing published yet"
    return f"{published}, {living(daemon.snapshot.explorers)} explorers, lag {daemon.lag}"
