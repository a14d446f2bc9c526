"""Where a soak runs: a file system of its own for the job, where this machine allows it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from beds import probe
from beds.loop import mounted
from soak.schedule import KINDS, ON_DISK


@dataclass
class Bed:
    """Where a soak runs: the file system of the job, a place beside it, and what can be done there."""

    point: str
    place: str
    kinds: list[str]
    skipped: list[str] = field(default_factory=list)

    @property
    def job(self) -> str:
        """Return the job directory."""
        return f"{self.point}/job"

    def log(self, name: str) -> str:
        """Return the log of a part."""
        return f"{self.place}/{name}.log"

    def journal(self, name: str) -> str:
        """Return the journal of a part."""
        return f"{self.place}/{name}.jsonl"


@contextlib.contextmanager
def bed(place: str) -> Iterator[Bed]:
    """Make a file system for the job if this machine lets us, and say what cannot be done without."""
    reasons = {kind: probe.loop_mount("ext4") for kind in ON_DISK} | {"cut": probe.silent_mount()}
    skipped = [f"no {kind}: {reason}" for kind, reason in reasons.items() if reason]
    kinds = [kind for kind in KINDS if not reasons.get(kind)]
    with contextlib.ExitStack() as stack:
        point = f"{place}/point"
        if "fill" in kinds:
            point = stack.enter_context(mounted("ext4")).point
        os.makedirs(f"{point}/job")
        os.makedirs(f"{place}/stage")
        yield Bed(point, place, kinds, skipped)
