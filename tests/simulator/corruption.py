"""Corrupt reads: for one reader and one moment, a bit of a step is flipped, or a file's old content is returned.

A read opens a file and gets its bytes a little later. What another host has replaced meanwhile is returned as it was
when the file was opened, for as long as attributes are believed: that is what NFS allows. Bits are flipped only in
files that have a digest: shards and manifests.
"""

from collections.abc import Callable
from random import Random

from syncd.protocol.layout import MANIFEST, STEP_PREFIX

_FLIPS, _LATE = 0.01, 0.02
_SHARD = ".safetensors"


class Corruption:
    """What reads return in one schedule.

    Args:
        random: Decides which reads it strikes.
        lasts: Whether there is still trouble.
        longest: Seconds between an open and its read, at most.
    """

    def __init__(self, random: Random, lasts: Callable[[], bool], longest: float) -> None:
        self._random, self._lasts, self._longest = random, lasts, longest
        self.flips = self.late = 0

    def pause(self) -> float:
        """Return the seconds between one open and its read."""
        if not self._longest or not self._lasts() or self._random.random() >= _LATE:
            return 0.0
        self.late += 1
        return self._random.uniform(0.0, self._longest)

    def flipped(self, path: str, data: bytes) -> bytes:
        """Return what one read gives of a content."""
        if not data or not _has_digest(path) or not self._lasts() or self._random.random() >= _FLIPS:
            return data
        self.flips += 1
        at = self._random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]


def _has_digest(path: str) -> bool:
    name = path.rpartition("/")[2]
    return f"/{STEP_PREFIX}" in path and (name == MANIFEST or name.endswith(_SHARD))
