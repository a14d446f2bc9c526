"""Waiting in tests, bounded."""

import time

LONG = 200.0
"""A bound that only a failing test reaches; on a busy machine importing transformers alone takes a minute."""


def until(holds, why="it never came to this", seconds=LONG):
    """Wait until a condition holds and return what it is; `why` is what a failure says, or returns it."""
    ends = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < ends, why() if callable(why) else why
        time.sleep(0.01)
    return found
