"""Probes of names: what renames and removals of directories do. The term lock and retention rest on these."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable

from syncd.doctor.finding import Answer, errno_name, fail, ok
from syncd.doctor.probe import Place, probe

_CLAIMS = 20
_FULL = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_UNFIT = "do not let two daemons run here, and use another file system for jobs"


@probe("rename-over-full", essential=True)
def rename_over_full(place: Place) -> Answer:
    """A directory renamed over a full one must fail: a term that is taken stays taken."""
    full_directory(f"{place.scratch}/claim")
    full_directory(f"{place.scratch}/term")
    try:
        os.rename(f"{place.scratch}/claim", f"{place.scratch}/term")
    except OSError as error:
        if error.errno in _FULL:
            return ok(f"refused ({errno_name(error)})")
        raise
    return fail("a directory replaced a full one: two daemons could lead", _UNFIT)


@probe("claim-race", essential=True)
def claim_race(place: Place) -> Answer:
    """Of two that claim the same term at once exactly one wins."""
    wins = [_race(f"{place.scratch}/{number}") for number in range(_CLAIMS)]
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
def rename_to_trash(place: Place) -> Answer:
    """A full directory moves into another directory by one rename, and never onto what is there already."""
    trash, step = f"{place.scratch}/trash", f"{place.scratch}/step"
    os.mkdir(trash)
    full_directory(step)
    os.rename(step, f"{trash}/step")
    if os.path.lexists(step) or os.listdir(f"{trash}/step") != ["file"]:
        return fail("a directory that was moved is not whole", _UNFIT)
    full_directory(step)
    try:
        os.rename(step, f"{trash}/step")
    except OSError as error:
        if error.errno in _FULL:
            return ok("one rename; an entry of the trash is never replaced")
        raise
    return fail("an entry of the trash was replaced", _UNFIT)


@probe("rmdir-full", essential=True)
def rmdir_full(place: Place) -> Answer:
    """A full directory cannot be removed: a leader is fenced only once its directory is empty and gone."""
    full_directory(f"{place.scratch}/full")
    try:
        os.rmdir(f"{place.scratch}/full")
    except OSError as error:
        if error.errno in _FULL:
            return ok(f"refused ({errno_name(error)})")
        raise
    return fail("a full directory was removed", _UNFIT)


@probe("create-in-removed", essential=True)
def create_in_removed(place: Place) -> Answer:
    """Nothing can be created in a removed directory: this fences a deposed leader."""
    removed = f"{place.scratch}/removed"
    os.mkdir(removed)
    _create(f"{place.scratch}/staged")
    descriptor = os.open(removed, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.rmdir(removed)
        attempts = (
            _refused(lambda: _create(f"{removed}/file")),
            _refused(lambda: _create("file", descriptor)),
            _refused(lambda: os.rename(f"{place.scratch}/staged", f"{removed}/file")),
        )
    finally:
        os.close(descriptor)
    if all(attempts):
        return ok(f"refused ({', '.join(dict.fromkeys(attempts))})")
    return fail("a file was created in a removed directory", _UNFIT)


def _refused(attempt: Callable[[], None]) -> str:
    """Return why an attempt was refused, the empty string if it was not."""
    try:
        attempt()
    except OSError as error:
        if error.errno in _GONE:
            return errno_name(error)
        raise
    return ""


@probe("exclusive-create", essential=True)
def exclusive_create(place: Place) -> Answer:
    """Of two creations of one name the second fails: temporary files are nobody else's."""
    _create(f"{place.scratch}/file")
    try:
        _create(f"{place.scratch}/file")
    except FileExistsError:
        return ok("refused (EEXIST)")
    return fail("O_EXCL created a file that was there", _UNFIT)


@probe("hard-links")
def hard_links(place: Place) -> Answer:
    """Hard links promote a sync step to a full one without a copy."""
    _create(f"{place.scratch}/one")
    os.link(f"{place.scratch}/one", f"{place.scratch}/two")
    count = os.stat(f"{place.scratch}/two").st_nlink
    return ok("supported") if count == 2 else ok(f"supported, but the count of links says {count}")  # noqa: PLR2004


def full_directory(path: str) -> None:
    """Make a directory with one file in it."""
    os.mkdir(path)
    _create(f"{path}/file")


def _create(path: str, directory: int | None = None) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=directory))
