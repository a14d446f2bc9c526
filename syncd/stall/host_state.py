"""What the daemons of this host know of their jobs, in files outside the mounts of the jobs.

Each daemon keeps one small file in the runtime directory of its user: what it knew last, in which state the mount is,
and since when. `syncd status` shows it when the mount does not answer.
"""

import contextlib
import glob
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from syncd.errors import SyncdError
from syncd.protocol.documents import decode, encode, record_from
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.process import Process

Document = dict[str, Any]

_OTHERS = ("/run/syncd", "/run/syncd/*", "/run/user/*/syncd", "/run/user/*/syncd/*")
_LIMIT = 64 << 10
_KEPT, _MOST_TIDIED = 86400.0, 1000
_MODE, _PRIVATE = 0o644, 0o700


@dataclass(frozen=True, slots=True)
class HostFile:
    """What one daemon of this host has reported about its job."""

    at: float  # when, seconds since the epoch
    process: Process
    document: Document  # the rest, as `docs/json.md` describes it

    @property
    def is_current(self) -> bool:
        # The file is this host's: a process of another boot ended with it.
        return self.process.boot == Process.current().boot and not self.process.is_gone()


class Writer:
    """Keeps the file of one daemon, which is found by the job's `root` and by other `names` of it."""

    def __init__(self, root: str, *names: str) -> None:
        self._directory = own_directory()
        self._paths = sorted({_path(self._directory, name) for name in (root, *names)})
        self._process = asdict(Process.current())
        _tidy(self._directory, time.time())

    def write(self, at: float, document: Mapping[str, Any]) -> None:
        """Replace the file, dated in seconds since the epoch; nothing depends on it, so errors are ignored."""
        data = encode({"at": at, "process": self._process, **document})
        with contextlib.suppress(OSError):
            os.makedirs(self._directory, _PRIVATE, exist_ok=True)
            if os.lstat(self._directory).st_uid != os.getuid():
                return  # in a directory that everybody may write to, somebody else created it
            for path in self._paths:
                _replace(path, data)

    def remove(self) -> None:
        """Remove the file: the daemon has ended in order."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def own_directory(environment: Mapping[str, str] = os.environ) -> str:
    """Return the directory in which a daemon of this user keeps its file."""
    if directories := environment.get("RUNTIME_DIRECTORY"):
        return directories.split(":")[0]
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return f"{runtime}/syncd"
    return f"{environment.get('TMPDIR', '/tmp')}/syncd-{os.getuid()}"  # noqa: S108 - private, and its owner is checked


def find(root: str) -> HostFile | None:
    """Return the newest report of a daemon of this host about a job, None without one.

    The job directory may be given by any of its names; it is not accessed, because its mount may not answer.
    """
    reports = [report for path in _paths(root) if (report := _read(path)) is not None]
    return max(reports, key=lambda report: (report.is_current, report.at), default=None)


def _paths(root: str) -> Iterator[str]:
    for directory in dict.fromkeys(
        (own_directory(), *(name for pattern in _OTHERS for name in glob.glob(pattern)))
    ):
        yield _path(directory, root)


def _path(directory: str, root: str) -> str:
    key = hashlib.sha256(os.path.abspath(root).encode(errors="surrogateescape")).hexdigest()[:32]
    return f"{directory}/{key}.json"


def _read(path: str) -> HostFile | None:
    try:
        fields = decode(LocalDisk().read(path, _LIMIT), path)
        process = record_from(Process, fields.record("process"))
        rest = {
            key: value for key, value in fields.document.items() if key not in ("at", "process", "protocol")
        }
        return HostFile(fields.number("at"), process, rest)
    except (OSError, SyncdError):
        return None


def _tidy(directory: str, now: float) -> None:
    """Remove old files of daemons that were killed."""
    with contextlib.suppress(OSError):
        for path in itertools.islice(glob.iglob(f"{glob.escape(directory)}/*.json"), _MOST_TIDIED):
            left = _read(path)
            if left is not None and not left.is_current and now - left.at > _KEPT:
                os.unlink(path)


def _replace(path: str, data: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(temporary, "wb", opener=lambda name, _: os.open(name, flags, _MODE)) as file:
        file.write(data)
    os.replace(temporary, path)
