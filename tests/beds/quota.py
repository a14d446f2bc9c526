"""A real quota: a directory on a btrfs of our own that may hold so many bytes and no more.

The limit is one of a quota group of btrfs: what goes over it fails with EDQUOT, also for root.
"""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from beds.loop import mounted

LIMIT_TRIES = 300


@dataclass(frozen=True)
class Quota:
    """A directory with a quota."""

    point: str
    group: str

    def limit(self, size: str) -> None:
        """Set how much the directory may hold, such as `4M`, or `none`.

        The kernel may refuse this with EDQUOT while the directory is full and others write
        to it. So the command names the group in the directory above, and is tried again.
        """
        command = ("btrfs", "qgroup", "limit", size, self.group, os.path.dirname(self.point))
        for _ in range(LIMIT_TRIES):
            done = _tried(*command)
            if os.strerror(errno.EDQUOT) not in done.stderr:
                break
            time.sleep(0.1)
        _checked(done)


@contextlib.contextmanager
def limited(size: str) -> Iterator[Quota]:
    """Make a directory that may hold `size`, and leave nothing of it behind."""
    with mounted("btrfs") as loop:
        _run("btrfs", "quota", "enable", loop.point)
        point = f"{loop.point}/limited"
        _run("btrfs", "subvolume", "create", point)
        quota = Quota(point, f"0/{_run('btrfs', 'inspect-internal', 'rootid', point).strip()}")
        quota.limit(size)
        os.chmod(quota.point, 0o777)
        yield quota


def _run(*command: str) -> str:
    return _checked(_tried(*command))


def _tried(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode != 0:
        raise OSError(f"{' '.join(done.args)}: {done.stderr.strip()}")
    return done.stdout
