"""Probes of locks. Information only: syncd uses none of them, others in the same directory may."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from syncd.doctor.finding import Answer, errno_name, ok
from syncd.doctor.probe import Place, probe

Kind = Literal["flock", "lockf"]
KINDS: tuple[Kind, ...] = ("flock", "lockf")
EXCLUDED = "excludes"
ACQUIRED = "both acquire"

_CALLS: dict[Kind, Callable[[int, int], None]] = {"flock": fcntl.flock, "lockf": fcntl.lockf}
_LIMIT = 20


@contextlib.contextmanager
def held(path: str, kind: Kind) -> Iterator[None]:
    """Hold an exclusive lock.

    Raises:
        OSError: It cannot be had; `BlockingIOError` where another one holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _CALLS[kind](descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def attempt(path: str, kind: Kind) -> str:
    """Try a lock that another one holds, and return in words what became of it."""
    try:
        with held(path, kind):
            return ACQUIRED
    except BlockingIOError:
        return EXCLUDED
    except OSError as error:
        return errno_name(error)


@probe("locks")
def local_locks(place: Place) -> Answer:
    """Whether flock and lockf exclude between processes of this host."""
    words = [f"{kind} {_between_processes(f'{place.scratch}/{kind}', kind)}" for kind in KINDS]
    return ok(f"on this host: {', '.join(words)} (syncd uses neither)")


def _between_processes(path: str, kind: Kind) -> str:
    try:
        with held(path, kind):
            return _other_process(path, kind)
    except OSError as error:
        return errno_name(error)


def _other_process(path: str, kind: Kind) -> str:
    code = "import sys; from syncd.doctor.locks import attempt; print(attempt(sys.argv[1], sys.argv[2]))"
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
