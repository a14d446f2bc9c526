"""`syncd watch` beside the trainer: started where no daemon leads the job, looked after, and ended with the run.

It ends with rank 0, however that ends: SIGTERM lets it finish the step in hand. What it has to say stands in
`JOB/.syncd/daemon.log`, each event in `events.jsonl` beside it.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from signal import SIGTERM
from typing import BinaryIO

import structlog

from syncd.errors import SyncdError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.marker import read_marker
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import read_version
from syncd.safe_open import open_append
from trainer.config.model import JobConfig
from trainer.launch.die_with_parent import tethered

EVERY = 5.0
"""Seconds between two looks at the daemon."""

ATTEMPTS = 5
"""Daemons that may end in a row, each within `SETTLED` seconds, before no other one is started."""

SETTLED = 60.0
PUBLISHING = 60.0
"""Seconds that the last step has to be published in."""

TIDYING = 300.0
"""Seconds that the end of a finished job may take to remove what is not kept, and to empty the trash."""

_STOPPING = 30.0
_LOG_BYTES = 8 << 20


def start_daemon(config: JobConfig, clock: Clock | None = None) -> "DaemonProcess | None":
    """Return the job's daemon as this process looks after it; None where the configuration wants none.

    Call it, and `check`, in the main thread of rank 0: the daemon ends with the thread that started it.

    Args:
        config: The settled configuration; the job directory exists.
        clock: This host's clock.
    """
    if not config.trainer.start_daemon:
        return None
    job = Job.at(config.job.dir, config.job.state_dir or None)
    daemon = DaemonProcess(job, options(config), clock or SystemClock(), policy_options(config))
    daemon.check()
    return daemon


def options(config: JobConfig) -> list[str]:
    """Return the options of `syncd watch` that the job's `[daemon]` table does not give."""
    found = policy_options(config)
    if "log_level" not in config.daemon:
        found += ["--log-level", "warning"]  # all events are in events.jsonl, which is bounded
    return found


def policy_options(config: JobConfig) -> list[str]:
    """Return those of them that name the job and say what is kept."""
    found = ["--state-dir", config.job.state_dir] if config.job.state_dir else []
    if "keep_full" not in config.daemon and config.trainer.max_checkpoints_to_keep:
        found += ["--keep-full", str(config.trainer.max_checkpoints_to_keep)]
    return found


class DaemonProcess:
    """A daemon that this process starts whenever nobody else leads the job.

    Args:
        job: The job.
        options: Options of `syncd watch`.
        clock: This host's clock.
        policy: Those of them that `syncd prune` takes.
    """

    def __init__(self, job: Job, options: Sequence[str], clock: Clock, policy: Sequence[str] = ()) -> None:
        self._job, self._clock = job, clock
        self._command = [sys.executable, "-m", "syncd", "watch", job.root, *options]
        self._kept = policy
        self._candidate = Candidate(job, clock)
        self._process: subprocess.Popen[bytes] | None = None
        self._due = self._started = float("-inf")
        self._ended = 0
        self._log = structlog.get_logger()

    @property
    def pid(self) -> int | None:
        """Return the process that this one has started and that runs, None where there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def check(self) -> None:
        """Take a look if one is due: start a daemon where none leads, again if ours has ended. Never raises."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY
        # Storage in trouble stops neither training nor us: the next look is due in seconds.
        with contextlib.suppress(OSError, SyncdError):
            self._look(now)

    def close(self, *, tidy: bool = False) -> None:
        """End our daemon once the newest step is published, or the time for it is over; `check` does nothing then.

        Args:
            tidy: If our daemon led, remove afterwards what retention does not keep, and the trash.
        """
        ends, self._due = self._clock.monotonic() + PUBLISHING, float("-inf")
        while self._process is not None and not self._is_published():
            if self._clock.monotonic() >= ends:
                self._log.warning(
                    "daemon_timed_out", detail="the last step is not published", job=self._job.root
                )
                break
            self.check()
            self._clock.sleep(0.1)
        led = self._process is not None
        self._stop()
        if tidy and led:
            self._tidy()

    def _tidy(self) -> None:
        """Prune once and wait until the trash is empty, within bounds."""
        command = [sys.executable, "-m", "syncd", "prune", self._job.root, "--no-keep-previous", *self._kept]
        try:
            with self._open_log() as log:
                code = subprocess.run(  # noqa: S603 - our own command
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, timeout=TIDYING
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            self._tell_untidy(str(error))
            return
        if code:
            self._tell_untidy(f"exit code {code}, see {self._job.state}/daemon.log")

    def _tell_untidy(self, reason: str) -> None:
        self._log.warning("job_cleanup_failed", reason=reason, hint=f"syncd prune {self._job.root}")

    def _look(self, now: float) -> None:
        if self.pid is not None:
            return
        if self._process is not None:
            self._note_end(self._process, now)
        if self._ended < ATTEMPTS and self._candidate.holder() is None:
            self._process, self._started = self._start(), now

    def _note_end(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        self._process = None
        self._ended = 1 if now - self._started > SETTLED else self._ended + 1
        self._log.warning(
            "daemon_exited",
            code=process.returncode,
            again=self._ended < ATTEMPTS,
            see=f"{self._job.state}/daemon.log",
            hint=None if self._ended < ATTEMPTS else f"syncd watch {self._job.root}",
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._open_log() as log:
            # In a session of its own: Ctrl-C and whoever ends our process group leave it to us.
            return subprocess.Popen(  # noqa: S603 - our own command
                tethered(SIGTERM, self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _open_log(self) -> BinaryIO:
        os.stat(self._job.root)  # what is not mounted must not be made
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
        except subprocess.TimeoutExpired:  # its file system hangs: its successor will fence it
            process.kill()
