"""Copies of steps in memory, made by hand for tests of those who read them."""

import os
import shutil

from syncd.protocol.layout import ACTOR
from syncd.protocol.memory_copies import MemoryDirectory


def remember(job, manifest, root):
    """Leave a copy of a step below a directory, as a trainer does; return the place of the job's copies."""
    place = MemoryDirectory.here(str(root), job.root)
    if not os.path.isdir(place.directory):
        os.mkdir(place.directory, 0o700)
    path = place.copy(manifest.step, manifest.attempt)
    shutil.copytree(f"{job.step(manifest.step)}/{ACTOR}", f"{path}/{ACTOR}")
    return place


def shard_of(place, manifest):
    """Return the path of a copy's first shard."""
    return f"{place.copy(manifest.step, manifest.attempt)}/{manifest.shards[0].name}"
