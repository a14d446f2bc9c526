"""One broadcast as the trainer's presence tells of it, and what a member that has received it runs. Pure.

The trainer alone writes a round; an explorer takes part exactly if the round names its present ask.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields
from syncd.protocol.version import Pair, Version

OPEN, COMMITTED, FAILED = "open", "committed", "failed"
KEY = "round"
AHEAD = "ahead"
TAKES_PART = "broadcast"


@dataclass(frozen=True, slots=True)
class Round:
    """One broadcast.

    Args:
        step: The step that is sent.
        attempt: The save that writes the same weights to files.
        generation: The published generation when the round began, 0 before the first version.
        epoch: The epoch of the group.
        digest: Of the metadata.
        timeout: Seconds that the round may take.
        members: The ask of each explorer that takes part.
        state: open, committed or failed.
        checksum: Of all bytes, once committed.
    """

    step: int
    attempt: str
    generation: int
    epoch: int
    digest: str
    timeout: float
    members: Mapping[str, int]
    state: str = OPEN
    checksum: str = ""

    def document(self) -> dict[str, Any]:
        """Return it as it stands in the presence."""
        return asdict(self) | {"members": dict(self.members)}

    @property
    def pair(self) -> Pair:
        """Return the pair that the step has once it is published, unless somebody goes back meanwhile."""
        return max(self.generation, 1), self.step

    def is_of(self, member: str, asked: int) -> bool:
        """Say whether it is the answer to an ask."""
        return self.members.get(member) == asked


@dataclass(frozen=True, slots=True)
class Ahead:
    """What an explorer runs that has taken a step from a broadcast and not yet seen it published.

    Args:
        step: The step.
        attempt: The save that it is of.
        generation: The published generation when it was sent.
    """

    step: int
    attempt: str
    generation: int


def round_of(info: Mapping[str, Any]) -> Round | None:
    """Return the round in what a trainer says of itself, None where there is none that can be read."""
    found = info.get(KEY)
    if not isinstance(found, Mapping):
        return None
    fields = Fields(found, KEY)
    try:
        members = fields.record("members")
        return Round(
            step=fields.integer("step"),
            attempt=fields.text("attempt"),
            generation=fields.integer("generation"),
            epoch=fields.integer("epoch"),
            digest=fields.text("digest"),
            timeout=fields.number("timeout"),
            members={name: members.integer(name) for name in members.document},
            state=fields.text("state"),
            checksum=fields.text("checksum"),
        )
    except CorruptDataError:
        return None


def is_overtaken(ahead: Ahead, offered: Pair) -> bool:
    """Say whether a published pair lies behind what is run: an older step of the same generation."""
    return offered[0] == max(ahead.generation, 1) and offered[1] < ahead.step


def is_same(ahead: Ahead, offered: Version, attempt: str) -> bool:
    """Say whether a published version has the very weights that are run.

    Args:
        ahead: What is run.
        offered: What is published.
        attempt: The attempt in the manifest of that.
    """
    return offered.step == ahead.step and attempt == ahead.attempt != ""
