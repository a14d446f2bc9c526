"""A trainer that is killed while it leaves a copy in memory: upload.py FILE PHASE NUMBER

The phase is `room` (the copy's directory is made), `put` (in the midst of a shard), `seal` (all is there but the
receipt) or `sealed`; the number is the copy's, from 1.
"""

import os
import signal
import sys

from syncd.parts.memory.send import MemoryCopies
from syncd.transports.files.memory_copy import MemoryCopy
from trainer.cli.main import main


class Fault:
    """Kills this process at a call."""

    def __init__(self, number):
        self.left = int(number)

    def hit(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(phase, number):
    """Have the fault strike before or after a method."""
    fault = Fault(number)
    owner, name, comes_after = {
        "room": (MemoryCopies, "make_room", True),
        "put": (MemoryCopy, "finish", False),
        "seal": (MemoryCopy, "seal", False),
        "sealed": (MemoryCopy, "seal", True),
    }[phase]
    original = getattr(owner, name)

    def struck(*arguments):
        if not comes_after:
            fault.hit()
        found = original(*arguments)
        if comes_after:
            fault.hit()
        return found

    setattr(owner, name, struck)


if __name__ == "__main__":
    arm(*sys.argv[2:])
    sys.argv = ["trainer", "train", sys.argv[1]]
    main()
