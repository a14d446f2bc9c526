"""What presences say about broadcasts. Pure.

A trainer's `info` holds three records about the same members: `agreed` (the step, and each explorer's ask),
`group` (the rendezvous group that it offers) and `round` (the broadcast that it sends). The trainer alone writes
them; an explorer takes part exactly if the agreement or the round names its present ask. An explorer's `info` holds
`ahead` while it runs a step from a broadcast that is not published yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncd.protocol.documents import record_in
from syncd.protocol.version import Pair

OPEN, COMMITTED, FAILED = "open", "committed", "failed"
AGREED, GROUP, KEY, AHEAD = "agreed", "group", "round", "ahead"
TAKES_PART = "broadcast"


@dataclass(frozen=True, slots=True)
class Round:
    """One broadcast.

    Args:
        step: The step that is sent.
        attempt: The save that writes the same weights to files.
        generation: The published generation at the start of the round, 0 before the first version.
        epoch: The epoch of the group.
        digest: The digest of the bucket plan.
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
    members: dict[str, int]
    state: str = OPEN
    checksum: str = ""

    @property
    def pair(self) -> Pair:
        """Return the pair that the step will be published under, unless somebody rolls back meanwhile."""
        return max(self.generation, 1), self.step

    def is_of(self, member: str, asked: int) -> bool:
        """Return whether the round answers an ask of a member."""
        return self.members.get(member) == asked


@dataclass(frozen=True, slots=True)
class UnpublishedStep:
    """A step that an explorer runs from a broadcast and that is not published yet.

    Args:
        step: The step.
        attempt: The save that writes it to files.
        generation: The published generation when it was sent.
    """

    step: int
    attempt: str
    generation: int


def round_of(info: Mapping[str, Any]) -> Round | None:
    """Return the round in a trainer's `info`, None if there is none that can be read."""
    return record_in(Round, info, KEY, "state", "checksum")


def agreed_asks(info: Mapping[str, Any]) -> dict[str, int]:
    """Return the asks that the last agreement in a trainer's `info` names, by explorer."""
    members = _record(info, AGREED).get("members")
    if not isinstance(members, Mapping):
        return {}
    return {name: asked for name, asked in members.items() if type(asked) is int}


def agreed_step(info: Mapping[str, Any]) -> int | None:
    """Return the step of the last agreement in a trainer's `info`, None if there is none."""
    step = _record(info, AGREED).get("step")
    return step if type(step) is int else None


def offered_epoch(info: Mapping[str, Any], group: str) -> int | None:
    """Return the epoch of a group that a trainer's `info` offers, None if it offers none or closes it."""
    record = _record(info, GROUP)
    epoch = record.get("epoch")
    is_open = record.get("name") == group and not record.get("closing")
    return epoch if is_open and type(epoch) is int else None


def _record(info: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = info.get(key)
    return found if isinstance(found, Mapping) else {}
