"""A mount namespace for the whole soak.

Each part has a namespace of its own, which is a copy: a file system of somebody else, mounted when a part starts,
would stay in use until that part ends. So the copies are made of a namespace that has nothing of the kind.
"""

import contextlib
import ctypes
import os
import subprocess
import tempfile

_CLONE_NEWNS = 0x00020000


def go_apart() -> None:
    """Move this process, which must have one thread, into a namespace of its own; without root it stays."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        _run("mount", "--make-rprivate", "/")
        for point in _foreign():
            _run("umount", "-l", point)


def _foreign() -> list[str]:
    below = f"{os.path.realpath(tempfile.gettempdir())}/"
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        points = [line.split()[1] for line in mounts if line.startswith("/dev/loop")]
    return [point for point in points if point.startswith(below)]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
