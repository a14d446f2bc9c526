"""Probes of single files: direct and uncached writes, times, permissions."""

import contextlib
import itertools
import mmap
import os
import stat
import time
from collections.abc import Iterator

from syncd.doctor.finding import Answer, errno_name, milliseconds, ok, warn
from syncd.doctor.probe import Place, probe

_BLOCK = 4096
_DONTCACHE = 0x80
_TIMES = 20
_SKEW = 60.0


@probe("direct-io")
def direct_io(place: Place) -> Answer:
    """O_DIRECT writes big shards without filling the page cache."""
    with _aligned() as block:
        try:
            _write(f"{place.scratch}/file", block, flags=os.O_DIRECT)
        except OSError as error:
            return ok(f"O_DIRECT not supported ({errno_name(error)}): shards go through the page cache")
    if os.stat(f"{place.scratch}/file").st_size != _BLOCK:
        return warn("an O_DIRECT write was short: shards go through the page cache")
    return ok("O_DIRECT works")


@probe("uncached-io")
def uncached_io(place: Place) -> Answer:
    """RWF_DONTCACHE is the second choice for big shards; kernels from 6.14 have it for some file systems."""
    with _aligned() as block:
        try:
            _write(f"{place.scratch}/file", block, uncached=_DONTCACHE)
        except OSError as error:
            return ok(f"RWF_DONTCACHE not supported ({errno_name(error)})")
    return ok("RWF_DONTCACHE works")


@contextlib.contextmanager
def _aligned() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(b"x" * _BLOCK)
        yield block


def _write(path: str, block: mmap.mmap, *, flags: int = 0, uncached: int = 0) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o644)
    try:
        return os.pwritev(descriptor, [block], 0, uncached)
    finally:
        os.close(descriptor)


@probe("clock")
def clock(place: Place) -> Answer:
    """How fine the times of files are, how far from this host's clock; syncd compares neither."""
    before = time.time()
    times = [_mtime(f"{place.scratch}/{number}") for number in range(_TIMES)]
    skew = times[0] / 1e9 - before
    steps = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
    grain = f"about {milliseconds(min(steps) / 1e9)}" if steps else f"coarser than {_TIMES} creations"
    detail = f"granularity {grain}; the server's clock is {_signed(skew)} of this host's"
    if abs(skew) > _SKEW:
        return warn(detail, "dates in listings will confuse people: chronyc tracking, on both")
    return ok(detail)


def _signed(skew: float) -> str:
    return f"{milliseconds(abs(skew))} {'ahead' if skew >= 0 else 'behind'}"


def _mtime(path: str) -> int:
    with open(path, "xb") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime_ns


@probe("permissions")
def permissions(place: Place) -> Answer:
    """Whether hosts that run as other users of the group can read what is published here."""
    place.disk.replace(f"{place.scratch}/file", b"x")
    os.mkdir(f"{place.scratch}/directory")
    file, directory = (os.stat(f"{place.scratch}/{name}") for name in ("file", "directory"))
    detail = f"files {stat.filemode(file.st_mode)}, directories {stat.filemode(directory.st_mode)}"
    if file.st_uid != os.geteuid():
        return warn(
            f"{detail}; the server makes user {os.geteuid()} into {file.st_uid}",
            "run trainer, daemon and explorers as one user, or export without squashing",
        )
    if not file.st_mode & stat.S_IRGRP or not directory.st_mode & stat.S_IXGRP:
        return warn(f"{detail}: the group cannot read them", "umask 022 (or UMask=0022 in the unit)")
    return ok(detail)
