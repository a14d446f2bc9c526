"""Runs `syncd watch` beside the trainer: starts it if no daemon leads the job, restarts it, and ends it with the run.

The daemon ends with rank 0, however that ends: SIGTERM lets it finish the step that it is publishing. Its output goes
to `JOB/.syncd/daemon.log`, its events to `events.jsonl` beside it.
"""

import contextlib
import os
import subprocess
import sys
from signal import SIGTERM
from typing import BinaryIO

import structlog

from syncd.errors import SyncdError
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import read_marker, read_version
from syncd.safe_open import open_append
from trainer.launch.die_with_parent import dying_with_parent

EVERY = 5.0  # seconds between two checks of the daemon
ATTEMPTS = 5  # daemons that may end in a row, each within `STABLE` seconds, before no other one is started

STABLE = 60.0
PUBLISHING = 60.0  # seconds that the daemon has to publish the last step

TIDYING = 300.0
"""Seconds that the end of a finished job may take to remove what is not kept, and to empty the trash."""

_STOPPING = 30.0
_LOG_BYTES = 8 << 20


def start_daemon(config: JobFile) -> "DaemonProcess | None":
    """Return the daemon process of the job, None if the configuration wants none.

    Call it, and `check`, in the main thread of rank 0: the daemon ends with the thread that started it.
    """
    if not config.trainer.start_daemon:
        return None
    daemon = DaemonProcess(config)
    daemon.check()
    return daemon


def options(config: JobFile) -> list[str]:
    """Return the options of `syncd watch` that the job's `[daemon]` table does not give."""
    arguments = policy_options(config)
    if "log_level" not in config.daemon:
        arguments += ["--log-level", "warning"]  # all events are in events.jsonl, which is bounded
    return arguments


def policy_options(config: JobFile) -> list[str]:
    """Return the options that name the job and its retention, which `syncd prune` takes too."""
    arguments = ["--state-dir", config.job.state_dir] if config.job.state_dir else []
    if "keep_full" not in config.daemon and config.trainer.max_checkpoints_to_keep:
        arguments += ["--keep-full", str(config.trainer.max_checkpoints_to_keep)]
    return arguments


class DaemonProcess:
    """A daemon that this process starts whenever no other process leads the job."""

    def __init__(self, config: JobFile) -> None:
        self._config, self._clock = config, SystemClock()
        self._job = Job.at(config.job.dir, config.job.state_dir or None)
        self._candidate = Candidate(self._job, self._clock)
        self._process: subprocess.Popen[bytes] | None = None
        self._due = self._started = float("-inf")
        self._ended = 0
        self._log = structlog.get_logger()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def check(self) -> None:
        """Start a daemon if a check is due and no daemon leads the job, or if ours has ended. Never raises."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY
        # A storage error must not stop training: the next check follows in seconds.
        with contextlib.suppress(OSError, SyncdError):
            self._start_if_needed(now)

    def close(self, *, tidy: bool = False) -> None:
        """End our daemon once the newest step is published, or after `PUBLISHING` seconds.

        With `tidy`, if our daemon led, the job is pruned afterwards and the trash emptied.
        """
        ends, self._due = self._clock.monotonic() + PUBLISHING, float("-inf")
        while self._process is not None and not self._is_published():
            if self._clock.monotonic() >= ends:
                self._log.warning(
                    "daemon_timed_out",
                    detail="the daemon has not published the last step",
                    job=self._job.root,
                )
                break
            self.check()
            self._clock.sleep(0.1)
        led = self._process is not None
        self._stop()
        if tidy and led:
            self._prune()

    def _prune(self) -> None:
        """Prune once and wait until the trash is empty, at most `TIDYING` seconds."""
        command = self._command("prune", "--no-keep-previous", *policy_options(self._config))
        try:
            with self._open_log() as log:
                code = subprocess.run(  # noqa: S603 - our own command
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, timeout=TIDYING
                ).returncode
            reason = f"exit code {code}, see {self._job.state}/daemon.log" if code else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if reason:
            hint = f"syncd prune {self._job.root}"
            self._log.warning("job_cleanup_failed", reason=reason, hint=hint)

    def _start_if_needed(self, now: float) -> None:
        if self.pid is not None:
            return
        if self._process is not None:
            self._record_end(self._process, now)
        if self._ended < ATTEMPTS and self._candidate.holder() is None:
            self._process, self._started = self._start(), now

    def _record_end(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        self._process = None
        self._ended = 1 if now - self._started > STABLE else self._ended + 1
        self._log.warning(
            "daemon_exited",
            code=process.returncode,
            again=self._ended < ATTEMPTS,
            see=f"{self._job.state}/daemon.log",
            hint=None if self._ended < ATTEMPTS else f"syncd watch {self._job.root}",
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._open_log() as log:
            # In its own session: Ctrl-C and signals to our process group must not end it before us.
            return subprocess.Popen(  # noqa: S603 - our own command
                dying_with_parent(SIGTERM, self._command("watch", *options(self._config))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _command(self, verb: str, *options: str) -> list[str]:
        return [sys.executable, "-P", "-m", "syncd", verb, self._job.root, *options]

    def _open_log(self) -> BinaryIO:
        os.stat(self._job.root)  # raises if the job is not mounted, so that it is not created
        self._job.disk.make_directory(self._job.state)
        path = f"{self._job.state}/daemon.log"
        if os.path.lexists(path) and os.lstat(path).st_size > _LOG_BYTES:
            os.replace(path, f"{path}.1")
        return open(open_append(path, self._job.disk.adopt), "ab")

    def _is_published(self) -> bool:
        try:
            newest, version = read_marker(self._job.disk, self._job.marker).step, read_version(self._job)
        except (OSError, SyncdError):
            return False
        return newest is None or (version is not None and version.step == newest)

    def _stop(self) -> None:
        process, self._process, self._due = self._process, None, float("inf")
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOPPING)
        except subprocess.TimeoutExpired:  # its file system hangs; the next daemon fences it
            process.kill()
