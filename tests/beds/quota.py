"""A real quota: a directory on a btrfs of our own that may hold so many bytes and no more.

The limit is one of a quota group of btrfs: what goes over it fails with EDQUOT, also for root.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from beds.loop import mounted


@dataclass(frozen=True)
class Quota:
    """A directory with a quota."""

    point: str

    def limit(self, size: str) -> None:
        """Set how much the directory may hold, such as `4M`, or `none`."""
        _run("btrfs", "qgroup", "limit", size, self.point)


@contextlib.contextmanager
def limited(size: str) -> Iterator[Quota]:
    """Make a directory that may hold `size`, and leave nothing of it behind."""
    with mounted("btrfs") as loop:
        _run("btrfs", "quota", "enable", loop.point)
        quota = Quota(f"{loop.point}/limited")
        _run("btrfs", "subvolume", "create", quota.point)
        quota.limit(size)
        os.chmod(quota.point, 0o777)
        yield quota


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
