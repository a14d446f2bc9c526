"""What a probe is and how it runs: in its own directory, for a bounded time, with its errors as findings."""

import contextlib
import errno
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from syncd.errors import TimedOutError
from syncd.protocol.disk import MISSING, Disk, LocalDisk, remove_tree
from syncd.protocol.mount import UNKNOWN, Mount
from syncd.stall.worker import WorkerThread

Verdict = Literal["ok", "warn", "fail", "skip"]

Figures = Mapping[str, float]

_GRAVITY: tuple[Verdict, ...] = ("fail", "warn")


class ProbeAnswer(NamedTuple):
    """What the body of a probe returns: a finding that has no name yet."""

    verdict: Verdict
    detail: str
    advice: str = ""
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found.

    Args:
        name: The probe.
        verdict: `fail` only for what syncd rests on; `warn` for what costs speed or comfort.
        detail: What was seen, with figures.
        advice: What to do about it: a command, an option; empty when there is nothing to do.
        figures: The figures in `detail`, by name, for programs.
    """

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
    figures: Figures = field(default_factory=dict)


def finding(name: str, answer: ProbeAnswer) -> Finding:
    """Give an answer the name of its probe."""
    return Finding(name, answer.verdict, answer.detail, answer.advice, answer.figures or {})


def ok(detail: str, figures: Figures | None = None) -> ProbeAnswer:
    """Return that all is well, or that it is information only."""
    return ProbeAnswer("ok", detail, "", figures)


def warn(detail: str, advice: str = "", figures: Figures | None = None) -> ProbeAnswer:
    """Return that syncd works, but worse than it could."""
    return ProbeAnswer("warn", detail, advice, figures)


def fail(detail: str, advice: str = "", figures: Figures | None = None) -> ProbeAnswer:
    """Return that something is not there which syncd rests on."""
    return ProbeAnswer("fail", detail, advice, figures)


def skip(detail: str) -> ProbeAnswer:
    """Return that it could not be looked at."""
    return ProbeAnswer("skip", detail)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict of all: the worst of them, `ok` where nothing was found."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in _GRAVITY if verdict in found), "ok")


T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Where a probe works.

    Args:
        directory: The directory that is examined, absolute; nothing is written into it itself.
        scratch: A directory below it that is the probe's own.
        mount: The mount that holds it.
        seconds: How long one measurement may take.
    """

    directory: str
    scratch: str
    mount: Mount = UNKNOWN
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
    body: Callable[[ProbeTarget], ProbeAnswer]

    def __call__(self, place: ProbeTarget) -> Finding:
        """Ask, in a new directory below the place's scratch directory."""
        scratch = f"{place.scratch}/{self.name}"
        try:
            os.mkdir(scratch)
            answer = self.body(replace(place, scratch=scratch))
        except OSError as error:
            return self.failed(place, error)
        return finding(self.name, answer)

    def failed(self, place: ProbeTarget, error: OSError) -> Finding:
        """Return the finding for an error that the probe did not expect."""
        detail = f"{errno_name(error)}: {error.strerror or error}"
        verdict: Verdict = "fail" if self.essential else "warn"
        return Finding(self.name, verdict, detail, advice_for(error, place.directory))


def probe(name: str, *, essential: bool = False) -> Callable[[Callable[[ProbeTarget], ProbeAnswer]], Probe]:
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
    begun = WorkerThread(work, "syncd-doctor")
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


def errno_name(error: OSError) -> str:
    """Return the symbol of an error, as in `ENOSPC`."""
    if error.errno == errno.EOPNOTSUPP:
        # Python names this number ENOTSUP; manual pages and strace name it so.
        return "EOPNOTSUPP"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def milliseconds(seconds: float) -> str:
    """Return a duration as people read it: 0.21 ms, 3.4 ms, 120 ms, 29.8 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"  # noqa: PLR2004 - two digits are enough


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which `percent` of all lie, 0 for none: the nearest rank, never interpolated."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
