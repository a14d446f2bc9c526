"""Probes of the mount, space and write permission, and of files: replaced under a reader, durable, direct, dated."""

import errno
import itertools
import mmap
import os
import stat
import threading
import time
from dataclasses import dataclass
from shlex import quote

from syncd.parts.doctor.probe import (
    Finding,
    ProbeTarget,
    advice_for,
    errno_name,
    fail,
    milliseconds,
    ok,
    percentile,
    probe,
    warn,
)
from syncd.protocol.mount import UNKNOWN_MOUNT

_TIGHT = 0.05
_LITTLE = 10 << 30
_FEW = 10_000
_WRITE = 1 << 20
_OPTIONS = {
    "soft": "soft: a slow server gives EIO; mount it hard",
    "softerr": "softerr: a slow server gives ETIMEDOUT; mount it hard",
    "noac": "noac is not needed and makes each stat a round trip",
}
_TYPES = {
    UNKNOWN_MOUNT.type: "the kernel does not say which file system this is: findmnt -T DIR",
    "tmpfs": "tmpfs is lost at the next boot, and no other host sees it",
    "ramfs": "ramfs is lost at the next boot, and no other host sees it",
    "overlay": "a container's own layer is lost with it, and no other host sees it",
}


@probe("mount", essential=True)
def mount(target: ProbeTarget) -> Finding:
    """Which file system it is, and options that hurt."""
    mounted = target.mount
    where = f"{mounted.type} {mounted.source} on {mounted.point} ({','.join(mounted.options)})"
    if mounted.option("nocto") is not None:
        return fail(where, "remove nocto: without close-to-open a host never knows what others have written")
    advice = [text for name, text in _OPTIONS.items() if mounted.option(name) is not None]
    advice += [text for name, text in _TYPES.items() if mounted.type == name]
    return warn(where, "; ".join(advice)) if advice else ok(where)


@probe("path")
def path(target: ProbeTarget) -> Finding:
    """Whether the path itself will trouble shells and tools."""
    directory = target.directory
    if not directory.isprintable() or any(letter.isspace() for letter in directory):
        return warn("white space or unprintable characters", "quote the path in scripts, hooks and units")
    longest = os.pathconf(target.scratch, "PC_NAME_MAX")
    return ok(f"{len(os.fsencode(directory))} bytes; names up to {longest}")


@probe("space", essential=True)
def space(target: ProbeTarget) -> Finding:
    """Free bytes and names, and whether the quota lets one megabyte through."""
    with open(f"{target.scratch}/file", "xb") as file:
        file.write(b"\0" * _WRITE)
        file.flush()
        os.fsync(file.fileno())
    return judge_space(os.statvfs(target.scratch), target.directory)


def judge_space(status: os.statvfs_result, directory: str) -> Finding:
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Many network and copy-on-write file systems do not count names: zero of zero.
    names = f"{status.f_favail:,} names" if status.f_files else "names not counted"
    detail = f"{_gigabytes(free)} of {_gigabytes(total)} free, {names}"
    if total and free < min(_LITTLE, total * _TIGHT):
        return warn(detail, f"make room, or keep fewer steps: du -sh {quote(directory)}/*")
    if status.f_files and status.f_favail < _FEW:
        return warn(detail, f"few names are left: df -i {quote(directory)}")
    return ok(detail, {"free_bytes": free})


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def writable(error: OSError | None, directory: str) -> Finding:
    if error is None:
        return Finding("writable", "ok", f"by user {os.geteuid()}")
    advice = advice_for(error, directory) or f"ls -ld {quote(directory)}"
    return Finding("writable", "fail", f"{errno_name(error)}: {error.strerror or error}", advice)


_BLOCK = 4096
_DONTCACHE = 0x80
_TIMES = 20
_SKEW = 60.0


@probe("direct-io")
def direct_io(target: ProbeTarget) -> Finding:
    """O_DIRECT writes big shards without filling the page cache."""
    if refusal := _write_block(f"{target.scratch}/file", flags=os.O_DIRECT):
        return ok(f"O_DIRECT not supported ({refusal}): shards go through the page cache")
    if os.stat(f"{target.scratch}/file").st_size != _BLOCK:
        return warn("an O_DIRECT write was short: shards go through the page cache")
    return ok("O_DIRECT works")


@probe("uncached-io")
def uncached_io(target: ProbeTarget) -> Finding:
    """RWF_DONTCACHE is the second choice for big shards; kernels from 6.14 have it for some file systems."""
    refusal = _write_block(f"{target.scratch}/file", uncached=_DONTCACHE)
    return ok(f"RWF_DONTCACHE not supported ({refusal})" if refusal else "RWF_DONTCACHE works")


def _write_block(path: str, *, flags: int = 0, uncached: int = 0) -> str:
    """Write an aligned block to a file; return the name of the error with which that failed, empty if it did not."""
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(b"x" * _BLOCK)
        try:
            with open(path, "wb", 0, opener=lambda name, mode: os.open(name, mode | flags, 0o644)) as file:
                os.pwritev(file.fileno(), [block], 0, uncached)
        except OSError as error:
            return errno_name(error)
    return ""


@probe("clock")
def clock(target: ProbeTarget) -> Finding:
    """How fine the times of files are, how far from this host's clock; syncd compares neither."""
    before = time.time()
    times = [_mtime(f"{target.scratch}/{number}") for number in range(_TIMES)]
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
def permissions(target: ProbeTarget) -> Finding:
    """Whether hosts that run as other users of the group can read what is published here."""
    target.disk.replace(f"{target.scratch}/file", b"x")
    os.mkdir(f"{target.scratch}/directory")
    file, directory = (os.stat(f"{target.scratch}/{name}") for name in ("file", "directory"))
    detail = f"files {stat.filemode(file.st_mode)}, directories {stat.filemode(directory.st_mode)}"
    if file.st_uid != os.geteuid():
        advice = "run trainer, daemon and explorers as one user, or export without squashing"
        return warn(f"{detail}; the server makes user {os.geteuid()} into {file.st_uid}", advice)
    if not file.st_mode & stat.S_IRGRP or not directory.st_mode & stat.S_IXGRP:
        return warn(f"{detail}: the group cannot read them", "umask 022 (or UMask=0022 in the unit)")
    return ok(detail)


_SIZE = 256 << 10
_SAMPLES = 50
_SLOW = 0.5
_HASTE = 1.0  # seconds of a local measurement, at most: the point is shown by then


@dataclass(slots=True)
class ReadCounts:
    reads: int = 0  # whole contents
    partial: int = 0  # contents that were cut or mixed
    missing: int = 0  # times the name was not there
    stale: int = 0  # times the server no longer knew the file that the name led to (ESTALE)

    def read(self, path: str) -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
        except FileNotFoundError:
            self.missing += 1
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.stale += 1
        else:
            self.reads += 1
            self.partial += data != data[:1] * _SIZE


@probe("replace", essential=True)
def replace_under_reader(target: ProbeTarget) -> Finding:
    """A file replaced by a rename is always one of its contents: never missing, never a part."""
    path = f"{target.scratch}/file"
    target.disk.replace(path, b"\0" * _SIZE)
    counts, over = ReadCounts(), threading.Event()

    def read_until_over() -> None:
        while not over.is_set():
            counts.read(path)

    reader = threading.Thread(target=read_until_over, daemon=True)
    reader.start()
    try:
        replaced = _replace_for(target, path, min(target.seconds, _HASTE))
    finally:
        over.set()
        reader.join(5)
    return judge_reads(counts, replaced)


def judge_reads(counts: ReadCounts, replaced: int) -> Finding:
    detail = f"{replaced} replaced, {counts.reads} reads, {counts.stale} ESTALE"
    if counts.partial or counts.missing:
        detail += f"; {counts.partial} partial, {counts.missing} missing"
        return fail(detail, "use another file system for jobs")
    return ok(detail, {"reads": counts.reads, "estale": counts.stale})


def _replace_for(target: ProbeTarget, path: str, seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += 1
        target.disk.replace(path, bytes([count % 256]) * _SIZE)
    return count


@probe("fsync", essential=True)
def file_fsync(target: ProbeTarget) -> Finding:
    """How long it takes to make a small file durable: each publish takes a few of these."""
    end, samples = time.monotonic() + min(target.seconds, _HASTE), list[float]()
    while len(samples) < _SAMPLES and (time.monotonic() < end or not samples):
        samples.append(_fsync_once(f"{target.scratch}/{len(samples)}"))
    middle, tail = percentile(samples, 50), percentile(samples, 99)
    figures = {"p50_ms": round(middle * 1000, 3), "p99_ms": round(tail * 1000, 3)}
    detail = f"p50 {milliseconds(middle)}, p99 {milliseconds(tail)} of {len(samples)}"
    if middle > _SLOW:
        return warn(detail, "each publish does several of these: check the load of the server", figures)
    return ok(detail, figures)


def _fsync_once(path: str) -> float:
    with open(path, "xb", buffering=0) as file:
        file.write(b"x" * 4096)
        began = time.monotonic()
        os.fsync(file)
        return time.monotonic() - began


@probe("fsync-directory", essential=True)
def directory_fsync(target: ProbeTarget) -> Finding:
    """Names survive a power cut once their directory is synced."""
    descriptor = os.open(target.scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        began = time.monotonic()
        os.fsync(descriptor)
        return ok(milliseconds(time.monotonic() - began))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        detail = f"not supported ({errno_name(error)}): only the file system decides when a rename is durable"
        return warn(detail, "a power cut may lose a whole step, never a part of one")
    finally:
        os.close(descriptor)
