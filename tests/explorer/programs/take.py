"""Takes a step from the stage of this host: take.py STAGE JOB STEP [DIE]

Prints as JSON the path, the bytes read from the job's shards, and whether the copy is what its manifest says;
then keeps it until its input ends. DIE is where it kills itself: read:N (the Nth read), rename, renamed, or
stop:N, where it stops itself instead.
"""

import json
import os
import signal
import sys

import xxhash

from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Version
from syncd.transports.files.leased_directory import payload_of
from syncd.transports.files.stage import HostStage, StageSource


class CountingDisk(LocalDisk):
    """Counts what is read of shards, and ends the process where it is told to."""

    def __init__(self, die):
        self.read_bytes, self.reads, self.die = 0, 0, die

    def read_at(self, path, offset, length):
        self.reads += 1
        if self.die == f"read:{self.reads}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.die == f"stop:{self.reads}":
            os.kill(os.getpid(), signal.SIGSTOP)
        data = super().read_at(path, offset, length)
        self.read_bytes += len(data)
        return data


def dying(die):
    rename = os.rename

    def renamed(source, target):
        if die == "rename":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if die == "renamed":
            os.kill(os.getpid(), signal.SIGKILL)

    return renamed


def main(stage, root, step, die=""):
    disk = CountingDisk(die)
    os.rename = dying(die)
    job = Job.at(root, disk=disk)
    manifest = read_manifest(disk, job.step(int(step)))
    version = Version(1, int(step), "weights", f"global_step_{step}/actor", manifest.digest)
    source = StageSource(disk, version, f"{job.step(int(step))}/actor", payload_of(manifest).records)
    place = HostStage(stage, job.root, stalled=0.5)
    staged = place.provide(source)
    print(
        json.dumps({"path": staged.path, "bytes": disk.read_bytes, "whole": is_whole(staged, source)}),
        flush=True,
    )
    sys.stdin.read()
    staged.close()
    place.close()


def is_whole(staged, source):
    for record in source.records:
        with open(f"{staged.path}/{record.name}", "rb") as file:
            if f"xxh3_128:{xxhash.xxh3_128(file.read()).hexdigest()}" != record.digest:
                return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
