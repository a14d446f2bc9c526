"""What presences say about broadcasts. Pure.

A trainer's `info` holds three records about the same members: `agreed` (the step, and each explorer's ask),
`group` (the rendezvous group that it offers) and `round` (the broadcast that it sends). The trainer alone writes
them; an explorer takes part exactly if the agreement or the round names its present ask. An explorer's `info` holds
`ahead` while it runs a step from a broadcast that is not published yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncd.protocol.documents import Document, as_document, record_in, without_none
from syncd.protocol.probe import Probe, probe_document
from syncd.protocol.version import Pair

OPEN, COMMITTED, FAILED = "open", "committed", "failed"
AGREED, GROUP, KEY, AHEAD = "agreed", "group", "round", "ahead"
TAKES_PART = "broadcast"


@dataclass(frozen=True, slots=True)
class Round:
    step: int  # the step that is sent
    attempt: str  # the save that writes the same weights to files
    generation: int  # the published generation at the start of the round, 0 before the first version
    epoch: int  # the epoch of the group
    digest: str  # the digest of the bucket plan
    timeout: float  # seconds that the round may take
    members: dict[str, int]  # the ask of each explorer that takes part
    state: str = OPEN  # open, committed or failed
    checksum: str = ""  # of all bytes, once committed
    # What the trainer's model answers with these weights; None if it was not asked.
    probe: Probe | None = None

    def document(self) -> Document:
        probe = self.probe and probe_document(self.probe)
        return without_none(as_document(self, members=dict(self.members), probe=probe), "probe")

    @property
    def pair(self) -> Pair:
        """Return the pair that the step will be published under, unless somebody rolls back meanwhile."""
        return max(self.generation, 1), self.step

    def is_of(self, member: str, asked: int) -> bool:
        return self.members.get(member) == asked


@dataclass(frozen=True, slots=True)
class UnpublishedStep:
    """A step that an explorer runs from a broadcast and that is not published yet."""

    step: int
    attempt: str  # the save that writes it to files
    generation: int  # the published generation when it was sent


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


def offered_epoch(info: Mapping[str, Any], process_group: str) -> int | None:
    """Return the epoch of a group that a trainer's `info` offers, None if it offers none or closes it."""
    record = _record(info, GROUP)
    epoch = record.get("epoch")
    is_open = record.get("name") == process_group and not record.get("closing")
    return epoch if is_open and type(epoch) is int else None


def _record(info: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    record = info.get(key)
    return record if isinstance(record, Mapping) else {}
