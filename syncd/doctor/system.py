"""Probes of the mount, the path, free space and write permission."""

import os
from shlex import quote

from syncd.doctor.probe import (
    Finding,
    ProbeTarget,
    advice_for,
    errno_name,
    fail,
    ok,
    probe,
    warn,
)
from syncd.protocol.mount import UNKNOWN_MOUNT, Mount

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
    "tmpfs": "tmpfs is gone at the next boot, and is on no other host",
    "ramfs": "ramfs is gone at the next boot, and is on no other host",
    "overlay": "a container's own layer is gone with it, and is on no other host",
}


@probe("mount", essential=True)
def mount(place: ProbeTarget) -> Finding:
    """Which file system it is, and options that hurt."""
    found = place.mount
    where = f"{found.type} {found.source} on {found.point} ({','.join(found.options)})"
    if found.option("nocto") is not None:
        return fail(where, "remove nocto: without close-to-open a host never knows what others have written")
    complaints = _complaints(found)
    if complaints:
        return warn(where, "; ".join(complaints))
    return ok(where)


def _complaints(found: Mount) -> list[str]:
    return [text for name, text in _OPTIONS.items() if found.option(name) is not None] + [
        text for name, text in _TYPES.items() if found.type == name
    ]


@probe("path")
def path(place: ProbeTarget) -> Finding:
    """Whether the path itself will trouble shells and tools."""
    directory = place.directory
    if not directory.isprintable() or any(letter.isspace() for letter in directory):
        return warn("white space or unprintable characters", "quote the path in scripts, hooks and units")
    longest = os.pathconf(place.scratch, "PC_NAME_MAX")
    return ok(f"{len(os.fsencode(directory))} bytes; names up to {longest}")


@probe("space", essential=True)
def space(place: ProbeTarget) -> Finding:
    """Free bytes and names, and whether the quota lets one megabyte through."""
    with open(f"{place.scratch}/file", "xb") as file:
        file.write(b"\0" * _WRITE)
        file.flush()
        os.fsync(file.fileno())
    return judge_space(os.statvfs(place.scratch), place.directory)


def judge_space(found: os.statvfs_result, directory: str) -> Finding:
    """Return what the free space of a file system means."""
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    # Many network and copy-on-write file systems do not count names: zero of zero.
    names = f"{found.f_favail:,} names" if found.f_files else "names not counted"
    detail = f"{_gigabytes(free)} of {_gigabytes(total)} free, {names}"
    if total and free < min(_LITTLE, total * _TIGHT):
        return warn(detail, f"make room, or keep fewer steps: du -sh {quote(directory)}/*")
    if found.f_files and found.f_favail < _FEW:
        return warn(detail, f"few names are left: df -i {quote(directory)}")
    return ok(detail, {"free_bytes": free})


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def writable(error: OSError | None, directory: str) -> Finding:
    """Return whether this user can write here."""
    if error is None:
        return Finding("writable", "ok", f"by user {os.geteuid()}")
    advice = advice_for(error, directory) or f"ls -ld {quote(directory)}"
    return Finding("writable", "fail", f"{errno_name(error)}: {error.strerror or error}", advice)
