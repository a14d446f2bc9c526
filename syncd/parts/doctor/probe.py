"""What a probe is and how it runs: in its own directory, for a bounded time, with its errors as findings."""

import contextlib
import errno
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from syncd.errors import JobMissingError, TimedOutError
from syncd.protocol.disk import MISSING, Disk, remove_tree
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.mount import UNKNOWN_MOUNT, Mount
from syncd.stall.worker import WorkerThread

Verdict = Literal["ok", "warn", "fail", "skip"]

Figures = Mapping[str, float]

_GRAVITY: tuple[Verdict, ...] = ("fail", "warn")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str  # the probe; empty until `FileSystemProbe` fills it in
    verdict: Verdict  # `fail` only for what syncd relies on; `warn` for what costs speed or comfort
    detail: str  # what was seen, with figures
    advice: str = ""  # the command or option that fixes it; empty if there is none
    figures: Figures = field(default_factory=dict)  # the figures in `detail`, by name, for programs


def ok(detail: str, figures: Figures | None = None) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding("", "ok", detail, "", figures or {})


def warn(detail: str, advice: str = "", figures: Figures | None = None) -> Finding:
    """Return a finding that syncd works, but slower or less comfortably."""
    return Finding("", "warn", detail, advice, figures or {})


def fail(detail: str, advice: str = "") -> Finding:
    """Return a finding that something that syncd relies on does not work."""
    return Finding("", "fail", detail, advice)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict of all: the worst of them, `ok` where nothing was found."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in _GRAVITY if verdict in verdicts), "ok")


T = TypeVar("T")

SCRATCH = ".syncd-doctor-"  # what the names of scratch directories begin with; a random part follows
STUCK = 30.0  # seconds after which an operation on the mount counts as stuck

_ADVICE = {
    errno.ENOSPC: "free some space: df -h {0}; df -i {0}",
    errno.EDQUOT: "raise the quota or remove files: quota -s",
    errno.EROFS: "mount it read-write, or give the daemon a place to write: syncd watch {0} --state-dir DIR",
    errno.EACCES: "let this user write: ls -ld {0}",
    errno.EPERM: "let this user write: ls -ld {0}",
    errno.ESTALE: "mount it again: the server no longer knows this directory",
    errno.EIO: "check the server and dmesg; a soft mount gives this error when the server is slow",
}
SILENT = "check the server and the network (a restarted NFSv4 server makes locks wait): dmesg | tail"
"""What to do if the file system does not answer."""

_SWEEPS = 50
_SWEEP_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    directory: str  # the directory that is examined, absolute; nothing is written to it directly
    scratch: str  # a directory below it that is the probe's own
    mount: Mount = UNKNOWN_MOUNT
    seconds: float = 5.0  # how long one measurement may take

    @property
    def disk(self) -> Disk:
        return LocalDisk()


@dataclass(frozen=True, slots=True)
class FileSystemProbe:
    name: str  # what its finding is called
    essential: bool  # whether syncd relies on it: then an error is a failure, otherwise a warning
    body: Callable[[ProbeTarget], Finding]  # runs it

    def __call__(self, target: ProbeTarget) -> Finding:
        scratch = f"{target.scratch}/{self.name}"
        try:
            os.mkdir(scratch)
            return replace(self.body(replace(target, scratch=scratch)), name=self.name)
        except OSError as error:
            return self.failed(target, error)

    def failed(self, target: ProbeTarget, error: OSError) -> Finding:
        """Return the finding for an error that the probe did not expect."""
        detail = f"{errno_name(error)}: {error.strerror or error}"
        verdict: Verdict = "fail" if self.essential else "warn"
        return Finding(self.name, verdict, detail, advice_for(error, target.directory))


def probe(
    name: str, *, essential: bool = False
) -> Callable[[Callable[[ProbeTarget], Finding]], FileSystemProbe]:
    return lambda body: FileSystemProbe(name, essential, body)


def advice_for(error: OSError, directory: str) -> str:
    return _ADVICE.get(error.errno or 0, "").format(shlex.quote(directory))


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Return the result of work that a dead server may never finish."""
    begun = WorkerThread(work, "syncd-doctor")
    begun.start()
    if not begun.wait(seconds):
        raise TimedOutError(f"no answer from the file system in {seconds:g} s")
    return begun.result()


@contextlib.contextmanager
def answering(directory: str) -> Iterator[None]:
    """Raise a time-out of `bounded` as the error for a directory whose server does not answer."""
    try:
        yield
    except TimedOutError as error:
        raise JobMissingError("the file system does not answer", path=directory, hint=SILENT) from error


@contextlib.contextmanager
def scratch_directory(directory: str) -> Iterator[str]:
    """Create a directory with a random name below `directory`, and remove it at the end."""
    path = f"{directory}/{SCRATCH}{uuid.uuid4().hex[:12]}"
    bounded(lambda: os.mkdir(path), STUCK)
    try:
        yield path
    finally:
        with contextlib.suppress(TimedOutError):
            bounded(lambda: sweep(path), STUCK)


def sweep(path: str) -> bool:
    """Remove a tree to which an interrupted probe may still write; return whether it is gone.

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
