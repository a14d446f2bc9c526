"""Who still needs which steps: leases and pins, read from their files now, not from a snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from syncd.protocol.layout import Job
from syncd.protocol.presence import Presences, path_of
from syncd.protocol.request import read_pins

Beat = tuple[str, int]  # (incarnation, beat) of a presence

Dead = Mapping[str, Beat]
"""The presence files of explorers and trainers whose leases are void, each with its last heartbeat. By file: an
explorer and a trainer may have one name."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What one reading of leases and pins found."""

    steps: Mapping[int, str]  # each step that must stay, with why
    everything: str = ""  # why every step must stay, empty where that is not so

    def why(self, step: int) -> str | None:
        return self.everything or self.steps.get(step)


def read_claims(job: Job, dead: Dead, presences: Presences | None = None) -> Claims:
    """Read who leases and pins what. What was written before this call is in it.

    Args:
        dead: Whose leases are void. One that beats again is alive.
        presences: Reads the presences, and saves the parsing of those that are as they were.
    """
    reader = presences or Presences(job.disk)
    steps = dict.fromkeys(read_pins(job), "pinned")
    everything = ""
    for directory in (job.explorers, job.trainers):
        readable, unreadable = reader.read(directory)
        for name, presence in (readable | unreadable).items():
            if dead.get(path_of(directory, name)) == (presence.incarnation, presence.beat):
                continue
            if presence.problem:
                everything = f"what {name} leases cannot be read"
            steps.update(dict.fromkeys(presence.leases, f"leased by {name}"))
    return Claims(steps, everything)
