"""What schedules may contain beyond faults of single calls: each deed can be switched on by name.

A deed draws from a source of chance of its own, so the rest of a schedule is the same with it and without it.
"""

from enum import StrEnum
from random import Random


class Deed(StrEnum):
    """One thing that people, hosts or disks do to a job."""

    ZOMBIE = "zombie"
    """A rank is paused in the middle of a save and wakes up after a later start has sealed the same step."""

    STATE_REMOVED = "state-removed"
    """Somebody removes the state directory, or moves it away, while daemons run."""

    JOB_REPLACED = "job-replaced"
    """Somebody removes the job and makes it again; the new directory has the inode number of the old one."""

    CORRUPT_READS = "corrupt-reads"
    """A read returns a flipped bit of a step, or the content that a file had when it was opened."""

    DELTAS = "deltas"
    """In every other schedule the trainer stores deltas and shortcuts, and explorers read chains."""


EVERY = frozenset(Deed)

USUAL = EVERY
"""What schedules contain unless told otherwise."""


def chance_of(seed: int, deed: Deed) -> Random:
    """Return the source of chance of one deed in one schedule."""
    return Random(f"{deed} {seed}")


def names_of(deeds: frozenset[Deed]) -> str:
    """Return what `deeds_of` reads."""
    return ",".join(sorted(deeds)) or "none"


def deeds_of(text: str) -> frozenset[Deed]:
    """Return the deeds that a list of names with commas means; `all` and `none` are names too.

    Raises:
        ValueError: A name is none of them.
    """
    if text in ("all", "none"):
        return EVERY if text == "all" else frozenset()
    return frozenset(Deed(name.strip()) for name in text.split(","))
