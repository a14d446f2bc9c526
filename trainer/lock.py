"""Ensures that one trainer trains a job: it holds a term of `.syncd/trainer.lock`, as the daemon of its own lock.

A trainer seals steps, makes training states part of them, and replaces marker and tracker, through the directory of
its term. A trainer that takes over removes that directory. One that was paused and wakes up can do none of this: the
file system refuses its renames.
"""

import threading
from dataclasses import dataclass

import structlog

from syncd.client.heartbeat import Heartbeat
from syncd.context import Closing
from syncd.errors import FencedError, LockHeldError, SyncdError, TermLostError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import STATE, Job, JobPath
from syncd.protocol.leadership import BEAT, TIMEOUT, Term
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.owner import refuse_mirrored
from syncd.protocol.takeover import Candidate

_PAUSE = 0.25  # seconds between two looks at a lock that is held
_LOOKS = 3 * BEAT  # seconds without a look at the lock after which the next check looks by itself


@dataclass(frozen=True)
class _Locked(Job):
    """The job as its trainers lock it: a term of theirs moves nothing into a trash."""

    lock = JobPath("root", f"{STATE}/trainer.lock")
    trash = JobPath("root", f"{STATE}/trainer.lock/.trash")


class TrainerLock(Closing):
    """This process's right to train a job; a thread renews it until it is closed."""

    def __init__(self, term: Term, clock: Clock) -> None:
        self._term = term
        self._lost = ""
        self._clock, self._beating = clock, threading.Lock()
        self._looked = clock.monotonic()
        self._heartbeat = Heartbeat(self._beat, BEAT / 2)

    @staticmethod
    def acquire(job: Job, clock: Clock | None = None, timeout: float = TIMEOUT) -> "TrainerLock":
        """Return the lock of a job that no other trainer trains.

        One that has ended on this host is known at once to be dead; any other is watched until it renews its lock, or
        has been silent for `timeout` seconds: a process that is there may be stopped.
        """
        refuse_mirrored(job, "a trainer")
        clock = clock or SystemClock()
        candidate = Candidate(_Locked(job.root, job.state, job.disk), clock, timeout, removes=False)
        is_logged = False
        while (holder := candidate.holder()) is not None:
            who = f"process {holder.process.pid} on {holder.host}"
            if candidate.is_surely_led():
                raise _held(job, who)
            if not is_logged:
                structlog.get_logger().info("earlier_trainer_watched", trainer=who, seconds=timeout)
                is_logged = True
            clock.sleep(_PAUSE)
        try:
            return TrainerLock(candidate.claim(), clock)
        except LockHeldError as error:
            raise _held(job, "one that started at the same time") from error

    @property
    def fence(self) -> str:
        """Return the directory through which this trainer publishes."""
        return self._term.staging

    def check(self) -> None:
        if self._clock.monotonic() - self._looked >= _LOOKS:
            self._beat()  # the thread has not run for long: this process was paused, and another may have taken over
        if self._lost:
            root = self._term.job.root
            raise FencedError(self._lost, path=root, hint=f"syncd status {root}")

    def close(self) -> None:
        self._heartbeat.stop()
        if not self._lost:
            self._term.release()

    def _beat(self) -> None:
        with self._beating:
            self._look()

    def _look(self) -> None:
        try:
            self._term.beat(self._term.floor)
        except TermLostError:
            self._lost = "this trainer's lock below .syncd was removed"
        except FencedError:
            self._lost = "another trainer has taken over this job while this one was paused"
        except (OSError, SyncdError):
            pass  # a later beat makes good what the storage refuses for a moment
        self._looked = self._clock.monotonic()


def _held(job: Job, who: str) -> LockHeldError:
    return LockHeldError(
        f"another trainer trains this job: {who}",
        path=job.root,
        hint=f"syncd status {job.root}  # stop that trainer first, or give this run another job.dir",
    )
