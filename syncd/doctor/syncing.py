"""Probes of writing: replacing a file under a reader, and making it durable."""

import errno
import os
import threading
import time
from dataclasses import dataclass

from syncd.doctor.finding import Answer, errno_name, fail, milliseconds, ok, percentile, warn
from syncd.doctor.probe import Place, probe

_SIZE = 256 << 10
_SAMPLES = 50
_SLOW = 0.5
_HASTE = 1.0
"""Seconds of a local measurement, at most: the point is shown by then."""


@dataclass(slots=True)
class Seen:
    """What a reader met while a file was replaced under it.

    Args:
        reads: Whole contents.
        partial: Contents that were cut or mixed.
        missing: Times the name was not there.
        stale: Times the server no longer knew the file that the name led to (ESTALE).
    """

    reads: int = 0
    partial: int = 0
    missing: int = 0
    stale: int = 0

    def look(self, path: str) -> None:
        """Read the file once."""
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
def replace_under_reader(place: Place) -> Answer:
    """A file replaced by a rename is always one of its contents: never missing, never a part."""
    path = f"{place.scratch}/file"
    place.disk.replace(path, b"\0" * _SIZE)
    seen, over = Seen(), threading.Event()
    reader = threading.Thread(target=_read_until, args=(path, seen, over), daemon=True)
    reader.start()
    try:
        replaced = _replace_for(place, path, min(place.seconds, _HASTE))
    finally:
        over.set()
        reader.join(5)
    return judge(seen, replaced)


def judge(seen: Seen, replaced: int) -> Answer:
    """Return what a reader's experience means."""
    detail = f"{replaced} replaced, {seen.reads} reads, {seen.stale} ESTALE"
    if seen.partial or seen.missing:
        detail += f"; {seen.partial} partial, {seen.missing} missing"
        return fail(detail, "use another file system for jobs")
    return ok(detail, {"reads": seen.reads, "estale": seen.stale})


def _read_until(path: str, seen: Seen, over: threading.Event) -> None:
    while not over.is_set():
        seen.look(path)


def _replace_for(place: Place, path: str, seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += 1
        place.disk.replace(path, bytes([count % 256]) * _SIZE)
    return count


@probe("fsync", essential=True)
def file_fsync(place: Place) -> Answer:
    """How long it takes to make a small file durable: each publish takes a few of these."""
    end, samples = time.monotonic() + min(place.seconds, _HASTE), list[float]()
    while len(samples) < _SAMPLES and (time.monotonic() < end or not samples):
        samples.append(_fsync_once(f"{place.scratch}/{len(samples)}"))
    middle, tail = percentile(samples, 50), percentile(samples, 99)
    figures = {"p50_ms": round(middle * 1000, 3), "p99_ms": round(tail * 1000, 3)}
    detail = f"p50 {milliseconds(middle)}, p99 {milliseconds(tail)} of {len(samples)}"
    if middle > _SLOW:
        return warn(detail, "each publish takes several of these: look at the load of the server", figures)
    return ok(detail, figures)


def _fsync_once(path: str) -> float:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, b"x" * 4096)
        began = time.monotonic()
        os.fsync(descriptor)
        return time.monotonic() - began
    finally:
        os.close(descriptor)


@probe("fsync-directory", essential=True)
def directory_fsync(place: Place) -> Answer:
    """Names survive a power cut once their directory is synced."""
    descriptor = os.open(place.scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        began = time.monotonic()
        os.fsync(descriptor)
        return ok(milliseconds(time.monotonic() - began))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return warn(
            f"not supported ({errno_name(error)}): only the file system decides when a rename is durable",
            "a step may vanish whole in a power cut, never in part",
        )
    finally:
        os.close(descriptor)
