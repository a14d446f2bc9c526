"""Probes of what only one of two processes may get: names, by rename, rmdir and O_EXCL, and locks.

Leadership and retention rest on names. syncd uses no locks; they are probed because others in the directory may.
"""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Literal

from syncd.parts.doctor.probe import Finding, ProbeTarget, errno_name, fail, ok, probe

_CLAIMS = 20
_FULL = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_UNFIT = "do not let two daemons run here, and use another file system for jobs"


@probe("rename-over-full", essential=True)
def rename_over_full(target: ProbeTarget) -> Finding:
    """A directory renamed over a full one must fail: a term that is taken stays taken."""
    claim, term = f"{target.scratch}/claim", f"{target.scratch}/term"
    full_directory(claim)
    full_directory(term)
    refusal = _refusal(lambda: os.rename(claim, term), _FULL)
    return _refused(refusal, "a directory replaced a full one: two daemons could lead")


@probe("claim-race", essential=True)
def claim_race(target: ProbeTarget) -> Finding:
    """Of two that claim the same term at once exactly one wins."""
    wins = [_race(f"{target.scratch}/{number}") for number in range(_CLAIMS)]
    if all(win == 1 for win in wins):
        return ok(f"{_CLAIMS} races, one winner each")
    return fail(f"{sum(win != 1 for win in wins)} of {_CLAIMS} races had no winner or two", _UNFIT)


def _race(directory: str) -> int:
    os.mkdir(directory)
    start, winners = threading.Barrier(2), list[str]()

    def claim(name: str) -> None:
        full_directory(f"{directory}/{name}")
        start.wait(5)
        with contextlib.suppress(OSError):
            os.rename(f"{directory}/{name}", f"{directory}/term")
            winners.append(name)

    threads = [threading.Thread(target=claim, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return len(winners)


@probe("rename-to-trash", essential=True)
def rename_to_trash(target: ProbeTarget) -> Finding:
    """A full directory moves into another directory by one rename, and never onto what is there already."""
    trash, step = f"{target.scratch}/trash", f"{target.scratch}/step"
    os.mkdir(trash)
    full_directory(step)
    os.rename(step, f"{trash}/step")
    if os.path.lexists(step) or os.listdir(f"{trash}/step") != ["file"]:
        return fail("a directory that was moved is not complete", _UNFIT)
    full_directory(step)
    if _refusal(lambda: os.rename(step, f"{trash}/step"), _FULL):
        return ok("one rename; an entry of the trash is never replaced")
    return fail("an entry of the trash was replaced", _UNFIT)


@probe("rmdir-full", essential=True)
def rmdir_full(target: ProbeTarget) -> Finding:
    """A full directory cannot be removed: a leader is fenced only once its directory is empty and gone."""
    full_directory(f"{target.scratch}/full")
    refusal = _refusal(lambda: os.rmdir(f"{target.scratch}/full"), _FULL)
    return _refused(refusal, "a full directory was removed")


@probe("create-in-removed", essential=True)
def create_in_removed(target: ProbeTarget) -> Finding:
    """Nothing can be created in a removed directory: this fences a deposed leader."""
    removed = f"{target.scratch}/removed"
    os.mkdir(removed)
    _create(f"{target.scratch}/staged")
    descriptor = os.open(removed, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.rmdir(removed)
        attempts = (
            _refusal(lambda: _create(f"{removed}/file"), _GONE),
            _refusal(lambda: _create("file", descriptor), _GONE),
            _refusal(lambda: os.rename(f"{target.scratch}/staged", f"{removed}/file"), _GONE),
        )
    finally:
        os.close(descriptor)
    refusal = ", ".join(dict.fromkeys(attempts)) if all(attempts) else ""
    return _refused(refusal, "a file was created in a removed directory")


@probe("exclusive-create", essential=True)
def exclusive_create(target: ProbeTarget) -> Finding:
    """Of two creations of one name the second fails: temporary files are nobody else's."""
    _create(f"{target.scratch}/file")
    refusal = _refusal(lambda: _create(f"{target.scratch}/file"), frozenset({errno.EEXIST}))
    return _refused(refusal, "O_EXCL created a file that exists")


def _refusal(attempt: Callable[[], None], numbers: frozenset[int]) -> str:
    """Return the error with which an attempt was refused, empty if it succeeded; raise any other error."""
    try:
        attempt()
    except OSError as error:
        if error.errno in numbers:
            return errno_name(error)
        raise
    return ""


def _refused(refusal: str, otherwise: str) -> Finding:
    return ok(f"refused ({refusal})") if refusal else fail(otherwise, _UNFIT)


@probe("hard-links")
def hard_links(target: ProbeTarget) -> Finding:
    """Hard links promote a sync step to a full one without a copy."""
    _create(f"{target.scratch}/one")
    os.link(f"{target.scratch}/one", f"{target.scratch}/two")
    count = os.stat(f"{target.scratch}/two").st_nlink
    return ok("supported") if count == 2 else ok(f"supported, but the link count is {count}")  # noqa: PLR2004


def full_directory(path: str) -> None:
    os.mkdir(path)
    _create(f"{path}/file")


def _create(path: str, directory: int | None = None) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=directory))


Kind = Literal["flock", "lockf"]
KINDS: tuple[Kind, ...] = ("flock", "lockf")
EXCLUDED = "excludes"
ACQUIRED = "both acquire"

_CALLS: dict[Kind, Callable[[int, int], None]] = {"flock": fcntl.flock, "lockf": fcntl.lockf}
_LIMIT = 20


@contextlib.contextmanager
def lock_held(path: str, kind: Kind) -> Iterator[None]:
    with open(path, "ab") as file:
        _CALLS[kind](file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def try_lock(path: str, kind: Kind) -> str:
    """Try a lock that another process holds; return `excludes`, `both acquire` or the name of an error."""
    try:
        with lock_held(path, kind):
            return ACQUIRED
    except BlockingIOError:
        return EXCLUDED
    except OSError as error:
        return errno_name(error)


@probe("locks")
def local_locks(target: ProbeTarget) -> Finding:
    """Whether flock and lockf exclude between processes of this host."""
    words = [f"{kind} {_between_processes(f'{target.scratch}/{kind}', kind)}" for kind in KINDS]
    return ok(f"on this host: {', '.join(words)} (syncd uses neither)")


def _between_processes(path: str, kind: Kind) -> str:
    try:
        with lock_held(path, kind):
            return _other_process(path, kind)
    except OSError as error:
        return errno_name(error)


def _other_process(path: str, kind: Kind) -> str:
    code = (
        "import sys; from syncd.parts.doctor.names import try_lock; print(try_lock(sys.argv[1], sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, path, kind]
    # The same modules must be found there, from wherever this process has them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and no shell
            command, capture_output=True, text=True, timeout=_LIMIT, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return "no answer"
    return done.stdout.strip() or "not known"
