"""Who still needs a step: leases and pins, read where they are, not as some look found them."""

from collections.abc import Mapping

from syncd.protocol.layout import Job
from syncd.protocol.pin import read_pins
from syncd.protocol.presence import path_of, read_presences

Beat = tuple[str, int]
"""(incarnation, beat) of a presence."""

Dead = Mapping[str, Beat]
"""The presence files of explorers and trainers whose leases are void, each with its last heartbeat. By file: an
explorer and a trainer may have one name."""


def held(job: Job, step: int, dead: Dead) -> str | None:
    """Say why a step must stay, None when nobody leases or pins it.

    Args:
        job: The job.
        step: The step.
        dead: Whose leases are void. One that beats again is alive.

    Raises:
        OSError: Who leases or pins cannot be read.
    """
    for directory in (job.explorers, job.trainers):
        presences, unreadable = read_presences(job.disk, directory)
        for name, presence in (presences | unreadable).items():
            if dead.get(path_of(directory, name)) == (presence.incarnation, presence.beat):
                continue
            if presence.problem:
                return f"what {name} leases cannot be read"
            if step in presence.leases:
                return f"leased by {name}"
    return "pinned" if step in read_pins(job) else None
