"""An explorer that trusts nothing: follow.py JOB IDENTITY LAST OUT

Follows the version by the protocol until it reaches step LAST: lease, then the manifest again, then every
byte of the step; holds the lease a while, and reads every byte again. Writes to OUT, as JSON, what it saw:

    loads   versions read whole under a lease
    gone    versions whose step had gone before the lease was confirmed: allowed, it goes on to a newer one
    wrong   what must never be: a version that went back, a step that is not whole, a leased one that vanished
"""

import contextlib
import json
import random
import sys
import time

from support import checker
from support.presences import BeatingPublisher

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import Presence
from syncd.protocol.version import read_version

POLL = 0.05
HOLD = 0.3


class Follower:
    """One explorer and what it has seen."""

    def __init__(self, job, identity):
        self.job = Job.at(job)
        self.presence = BeatingPublisher(self.job.disk, SystemClock(), self.job.explorers, Presence(identity))
        self.seen = {"loads": 0, "gone": 0, "wrong": [], "pairs": []}
        self.pair = None

    def follow(self, last):
        self.presence.prepare()
        self.presence.update()
        while self.pair is None or self.pair[1] < last:
            if not self.look():
                self.presence.beat()
                time.sleep(POLL)
        self.presence.update(leases=())

    def look(self):
        """Look for a version once; load it and return True if it is new."""
        with contextlib.suppress(*MISSING):
            self.job.disk.refresh(self.job.state)
        version = read_version(self.job)
        if version is None or version.pair == self.pair:
            return False
        if self.pair and version.pair < self.pair:
            self.seen["wrong"].append(f"the version went back from {self.pair} to {version.pair}")
        self.pair = version.pair
        self.seen["pairs"].append(version.pair)
        self.load(version)
        return True

    def load(self, version):
        self.presence.update(leases=(version.step,), loading=version.pair)
        if not self.is_confirmed(version):
            self.seen["gone"] += 1
            return
        for moment in ("loaded", "held"):
            if wrong := checker.why_not_whole(self.job.root, version.step):
                self.seen["wrong"].append(f"step {version.step} under a lease, {moment}: {wrong}")
                return
            time.sleep(random.uniform(0, HOLD))
        self.presence.update(applied=version.pair, loading=None)
        self.seen["loads"] += 1

    def is_confirmed(self, version):
        """Say whether the step is still there now that the lease is published."""
        try:
            self.job.disk.refresh(self.job.root)
            self.job.disk.refresh(self.job.step(version.step))
            return read_manifest(self.job.disk, self.job.step(version.step)).digest == version.digest
        except MISSING:
            return False
        except (OSError, CorruptDataError) as error:
            self.seen["wrong"].append(f"the manifest of step {version.step}: {error}")
            return False


def main(job, identity, last, out):
    follower = Follower(job, identity)
    try:
        follower.follow(int(last))
    finally:
        with open(out, "w", encoding="ascii") as file:
            json.dump(follower.seen, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
