"""Writes steps by the protocol, as a trainer does: write_steps.py JOB FROM TO WORLD_SIZE [OPTION ...]

Run again after a crash it goes on: a step that is sealed already is announced if it was not, others are
written anew. Every file's content names its step, writer and attempt, so a mix of two attempts is seen.

    --pause SECONDS     wait between two steps
    --paced             write no step before the one before is published
    --log FILE          append "STEP MONOTONIC" after each announcement
    --size BYTES        of each shard's tensor
    --break WHAT        do it wrongly, to show that the tests see it: marker-first, no-fsync, in-place
"""

import argparse
import contextlib
import json
import os
import struct
import sys
import time

from syncd.errors import SyncdError, TimedOutError, UsageError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job, shard_name
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import read_marker, read_version, write_marker
from syncd.protocol.writer import StepWriter

PATIENCE = 200.0


class NoSync(LocalDisk):
    """A disk of a writer that forgets to sync what it writes, but for the manifest and the marker."""

    def replace(self, path, data, **more):
        if path.endswith((".safetensors", ".json")) and not path.endswith("manifest.json"):
            with _without_fsync():
                return super().replace(path, data, **more)
        return super().replace(path, data, **more)


class InPlace(LocalDisk):
    """A disk of a writer that writes where readers look."""

    def replace(self, path, data, **more):
        with open(path, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)


@contextlib.contextmanager
def _without_fsync():
    real, os.fsync = os.fsync, lambda _: None
    try:
        yield
    finally:
        os.fsync = real


def shard(step, writer, attempt, size):
    """Return a safetensors file of one tensor whose metadata says who wrote it, in two pieces."""
    metadata = {"step": str(step), "writer": str(writer), "attempt": attempt}
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": metadata, f"layer.{writer}": tensor}).encode()
    header += b" " * (-len(header) % 8)
    return [struct.pack("<Q", len(header)) + header, bytes([step % 251]) * size]


def write_step(job, step, world_size, options):
    """Write and seal one step as all of its writers in turn."""
    attempt = os.urandom(8).hex()
    step_writer = StepWriter(job, step, world_size, attempt)
    step_writer.begin()
    if options.broken == "marker-first":
        write_marker(job.disk, job.marker, step)
    for writer in range(1, world_size + 1):
        name = f"actor/{shard_name(writer, world_size)}"
        record = step_writer.write(name, shard(step, writer, attempt, options.size), tensors=1)
        step_writer.receipt(writer, [record], _beside(step_writer, attempt) if writer == 1 else [])
    if step_writer.seal() is None:
        raise AssertionError(f"step {step} is not sealed by its last writer")
    return step_writer


def _beside(step_writer, attempt) -> list[FileRecord]:
    config = json.dumps({"architectures": ["Toy"], "attempt": attempt}).encode()
    return [step_writer.write("actor/config.json", config)]


def announce(job, step, world_size, options):
    """Bring one step out, whatever an earlier run has left of it."""
    try:
        step_writer = write_step(job, step, world_size, options)
    except UsageError:
        newest = read_marker(job.disk, job.marker).step
        if newest is not None and newest >= step:
            return
        step_writer = StepWriter(job, step, world_size, "announces")
    step_writer.announce()
    if options.log:
        with open(options.log, "a", encoding="ascii") as log:
            log.write(f"{step} {SystemClock().monotonic():.6f}\n")


def until_published(job, step):
    """Wait for the version of a step, or of a newer one."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        with contextlib.suppress(*MISSING):
            job.disk.refresh(job.state)
            version = read_version(job)
            if version is not None and version.step >= step:
                return
        time.sleep(0.1)
    raise TimedOutError(f"step {step} was not published within {PATIENCE:g} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--log")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--break", dest="broken", choices=["marker-first", "no-fsync", "in-place"])
    options = parser.parse_args()
    disk = {"no-fsync": NoSync, "in-place": InPlace}.get(options.broken, LocalDisk)()
    job = Job.at(options.job, disk=disk)
    for step in range(options.first, options.last + 1):
        announce(job, step, options.world_size, options)
        if options.paced:
            until_published(job, step)
        time.sleep(options.pause)


def end(error, status):
    """Say why and stop; the place where it is said may be full too."""
    with contextlib.suppress(OSError):
        print(f"error: {error}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    try:
        main()
    except SyncdError as error:
        end(error, error.exit_code)
    except OSError as error:
        end(error, 74)
