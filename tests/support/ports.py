"""Ports for servers that a test starts: none that the kernel gives to somebody who connects meanwhile."""

import itertools
import os
import random
import socket

_FIRST, _EACH = 20000, 1500  # below the ports of connections, which begin at 32768; so many for each worker
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_numbers = itertools.count(random.randrange(_EACH))


def free_port() -> int:
    """Return a port that nobody listens on, and that this process returns to nobody else."""
    for _ in range(_EACH):
        port = _FIRST + _worker * _EACH + next(_numbers) % _EACH
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("no port of this worker is free")
