"""How a probe is run: in a directory of its own, for a bounded time, with its errors turned into findings."""

import contextlib
import errno
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from syncd.doctor.finding import Answer, Finding, Verdict, errno_name, finding
from syncd.errors import TimedOutError
from syncd.protocol.disk import MISSING, Disk, remove_tree
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.mount import UNKNOWN_MOUNT, Mount
from syncd.worker_thread import Work

SCRATCH = ".syncd-doctor-"
"""What the names of scratch directories begin with; a random part follows."""

STUCK = 30.0
"""Seconds after which an operation is taken to be stuck on the mount."""

_ADVICE = {
    errno.ENOSPC: "free some space: df -h {0}; df -i {0}",
    errno.EDQUOT: "raise the quota or remove files: quota -s",
    errno.EROFS: "mount it read-write, or give the daemon a place to write: syncd watch {0} --state-dir DIR",
    errno.EACCES: "let this user write: ls -ld {0}",
    errno.EPERM: "let this user write: ls -ld {0}",
    errno.ESTALE: "mount it again: the server no longer knows this directory",
    errno.EIO: "look at the server and at dmesg; a soft mount gives this error when the server is slow",
}
_SWEEPS = 50
_SWEEP_PAUSE = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a probe works.

    Args:
        directory: The directory that is examined, absolute; nothing is written into it itself.
        scratch: A directory below it that is the probe's own.
        mount: The mount that holds it.
        seconds: How long one measurement may take.
    """

    directory: str
    scratch: str
    mount: Mount = UNKNOWN_MOUNT
    seconds: float = 5.0

    @property
    def disk(self) -> Disk:
        return LocalDisk()


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to a file system.

    Args:
        name: What its finding is called.
        essential: Whether syncd rests on it: an error is a failure then, otherwise a warning.
        body: Asks it.
    """

    name: str
    essential: bool
    body: Callable[[Place], Answer]

    def __call__(self, place: Place) -> Finding:
        """Ask, in a new directory below the place's scratch directory."""
        scratch = f"{place.scratch}/{self.name}"
        try:
            os.mkdir(scratch)
            answer = self.body(replace(place, scratch=scratch))
        except OSError as error:
            return self.failed(place, error)
        return finding(self.name, answer)

    def failed(self, place: Place, error: OSError) -> Finding:
        """Return the finding for an error that the probe did not expect."""
        detail = f"{errno_name(error)}: {error.strerror or error}"
        verdict: Verdict = "fail" if self.essential else "warn"
        return Finding(self.name, verdict, detail, advice_for(error, place.directory))


def probe(name: str, *, essential: bool = False) -> Callable[[Callable[[Place], Answer]], Probe]:
    """Make a probe of a function."""
    return lambda body: Probe(name, essential, body)


def advice_for(error: OSError, directory: str) -> str:
    """Return what to do about an error."""
    return _ADVICE.get(error.errno or 0, "").format(shlex.quote(directory))


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Do something that a dead server may never finish.

    Raises:
        TimedOutError: It has not finished; its thread is left behind and ends with the process.
    """
    begun = Work(work, "syncd-doctor")
    begun.start()
    if not begun.wait(seconds):
        raise TimedOutError(f"no answer from the file system in {seconds:g} s")
    return begun.result()


@contextlib.contextmanager
def scratch_directory(directory: str) -> Iterator[str]:
    """Make a directory of a random name below `directory`, and remove it whatever happens."""
    path = f"{directory}/{SCRATCH}{uuid.uuid4().hex[:12]}"
    bounded(lambda: os.mkdir(path), STUCK)
    try:
        yield path
    finally:
        with contextlib.suppress(TimedOutError):
            bounded(lambda: sweep(path), STUCK)


def sweep(path: str) -> bool:
    """Remove a tree in which an interrupted probe may still be writing; say whether it is gone.

    NFS keeps a removed file that is still open as `.nfs*`, so a directory may be full for a moment longer.
    """
    for _ in range(_SWEEPS):
        with contextlib.suppress(OSError):
            remove_tree(LocalDisk(), path)
        try:
            os.lstat(path)
        except MISSING:
            return True
        except OSError:
            return False
        time.sleep(_SWEEP_PAUSE)
    return False
