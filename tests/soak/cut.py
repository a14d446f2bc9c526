"""Cuts one process off from a job for a while: cut.py PID JOB SECONDS

The process must be in a mount namespace of its own. There the job is covered by a mount that never answers, as that
of a server that is gone; nobody else is concerned. At the end all that waited gets an error.
"""

import ctypes
import os
import sys
import time

from beds.silent import silent

_CLONE_NEWNS = 0x00020000


def main(pid: str, job: str, seconds: str) -> None:
    with open(f"/proc/{pid}/ns/mnt", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace.name)
    with silent(job):
        time.sleep(float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
