"""An explorer that reads every version through the stage of its host: delta_reader.py JOB STAGE NAME OUT

While it takes a copy and reads what a hook would be given, it holds STAGE.taking shared: nobody changes copies then.
Appends to OUT, for each version that it was given a directory of: "PAIR MANIFEST-DIGEST CONTENT-DIGEST KIND". A
version that was removed or written again before its lease was confirmed is left for the next one; any other error is
told, and ends it with 1. It runs until it is killed.
"""

import fcntl
import sys
import time
from contextlib import closing, contextmanager

from support.deltas import contents_digest
from support.fake_hook import FakeEngine, FakeHook

from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.versions import Fetcher
from syncd.client.client import Client
from syncd.errors import TryAgainError
from syncd.protocol.local_disk import SystemClock
from syncd.transports.files.leased_directory import LoadTimings


def main(job, stage, name, out):
    with Client.open(job, "explorer", name, poll=0.005) as client, open(out, "a", encoding="ascii") as log:
        fetcher = Fetcher(
            client, FakeHook(FakeEngine()), FollowOptions(stage=stage), lambda: False, tell_of_damage
        )
        known = None
        while True:
            version = client.wait_for(lambda known=known: newer(client, known), 3600.0)
            try:
                with taking(stage), closing(fetcher.fetch(version, LoadTimings(SystemClock()))) as held:
                    content = contents_digest(held.directory.path)
            except TryAgainError:
                time.sleep(0.01)
                continue
            log.write(f"{version.generation}.{version.step} {version.digest} {content} {version.kind}\n")
            log.flush()
            client.confirm(version)
            known = version.pair


@contextmanager
def taking(stage):
    with open(f"{stage}.taking", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def tell_of_damage(_level, name, **fields):
    if name == "stage_copy_damaged":
        print(name, fields["path"], fields["reason"], file=sys.stderr, flush=True)


def newer(client, known):
    """Return the published version if it is not the known one."""
    version = client.versions.latest_or_none()
    return version if version is not None and version.pair != known else None


if __name__ == "__main__":
    main(*sys.argv[1:])
