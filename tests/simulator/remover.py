"""A simulated person who removes what nobody should remove: the state directory, or the whole job."""

import contextlib
from collections.abc import Callable
from random import Random

from simulator.disk import SimDisk
from simulator.record import AWAY, STATE
from simulator.world import Process
from syncd.protocol.disk import MISSING, list_if_there

REMOVER = "remover"
"""The name of the program: what it does is nobody else's fault."""

_TRIES = 20
_AT_ONCE = 0.5


class StateRemover:
    """Removes the state directory once, entry after entry as `rm -rf` does, or moves it away in one rename.

    Args:
        random: Decides when and how.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._at = random.uniform(0.2, 0.9)

    def main(self, process: Process) -> None:
        """Remove it when the time has come."""
        process.sleep(max(self._at * process.world.profile.trouble - process.world.now, 0.0))
        disk = SimDisk(process.host, process)
        if self._random.random() < _AT_ONCE:
            _until_done(process, lambda: disk.rename(STATE, AWAY))
        else:
            _until_done(process, lambda: _remove_tree(disk, STATE))
        process.world.counts["state removed"] += 1
        process.program.wanted = False


def _until_done(process: Process, act: Callable[[], None]) -> None:
    """Try something until it succeeds: daemons make names again meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            act()
            return
        process.sleep(0.1)


def _remove_tree(disk: SimDisk, path: str) -> None:
    for entry in list_if_there(disk, path):
        inner = f"{path}/{entry.name}"
        with contextlib.suppress(*MISSING):
            if entry.kind == "directory":
                _remove_tree(disk, inner)
            else:
                disk.unlink(inner)
    with contextlib.suppress(*MISSING):
        disk.remove_directory(path)
