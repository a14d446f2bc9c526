"""File systems of our own: an image in a file, mounted through a loop device, whose power can be cut."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from beds.shut import cut_power

_SIZE = {"ext4": "64M", "xfs": "320M", "btrfs": "128M"}
"""Sparse; 300 MiB is the least that mkfs.xfs makes, 109 that of btrfs."""

_MKFS = {
    "ext4": ["mkfs.ext4", "-qF"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


@dataclass(frozen=True)
class Loop:
    """One mounted image."""

    image: str
    point: str

    def mount(self) -> None:
        _run("mount", "-o", "loop", self.image, self.point)

    def unmount(self) -> None:
        """Unmount it; return when the file system is gone, not only its name."""
        # A process that was just killed may still hold the mount for a moment, and a namespace of mounts that was
        # made meanwhile holds a copy: mounted again now, it would still be the one whose power was cut.
        for _ in range(1200):
            if _succeeds("umount", self.point) or not self._is_mounted():
                break
            time.sleep(0.05)
        else:
            _run("umount", "-l", self.point)
        for _ in range(1200):
            if not self._devices():
                return
            time.sleep(0.05)
        raise OSError(f"{self.image} is still in use: {self._devices()}")

    def _is_mounted(self) -> bool:
        # os.path.ismount says no where a stat fails, as it does after a power cut.
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            return any(line.split()[1] == self.point for line in mounts)

    def _devices(self) -> str:
        """Return the loop devices that still have the image; each is released with its file system."""
        command = ["losetup", "--associated", self.image]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def sync(self) -> None:
        """Make everything so far durable, so that a cut takes only what comes after."""
        _run("sync", "-f", self.point)

    def cut_and_remount(self) -> None:
        """Cut the power, and bring the file system back from what is on its disk."""
        cut_power(self.point)
        self.unmount()
        self.mount()


@contextlib.contextmanager
def mounted(kind: str, directory: str | None = None) -> Iterator[Loop]:
    """Make a file system of `kind`, mount it, and leave nothing of it behind.

    Args:
        kind: The file system: ext4, xfs or btrfs, which has no power cut.
        directory: Where the image and the mount point are made; the place for temporary files by default.
    """
    with tempfile.TemporaryDirectory(prefix=f"loop-{kind}-", dir=directory) as place:
        loop = Loop(f"{place}/image", f"{place}/mount")
        os.mkdir(loop.point)
        _run("truncate", "-s", _SIZE[kind], loop.image)
        _run(*_MKFS[kind], loop.image)
        loop.mount()
        try:
            yield loop
        finally:
            loop.unmount()


@contextlib.contextmanager
def frozen(point: str) -> Iterator[None]:
    """Freeze a file system: whoever writes to it stands in the kernel and cannot even be killed."""
    subprocess.run(["fsfreeze", "--freeze", point], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", point], check=True, timeout=60)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
