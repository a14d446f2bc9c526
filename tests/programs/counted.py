"""Runs `syncd` and writes down what it reads of safetensors files: counted.py OUT ARGUMENT ...

A line of OUT is the JSON list of a file's path, the offset, and the bytes that were read there. `LocalDisk`, through
which a follower reads the files of versions, reads them by `os.pread`.
"""

import json
import os
import sys

from syncd.cli.main import run

_pread = os.pread


def pread(descriptor, length, offset):
    """Read as `os.pread` does, and write it down."""
    data = _pread(descriptor, length, offset)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path.endswith(".safetensors"):
        os.write(LOG, (json.dumps([path, offset, len(data)]) + "\n").encode())
    return data


if __name__ == "__main__":
    LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.pread = pread
    sys.exit(run(sys.argv[2:]))
