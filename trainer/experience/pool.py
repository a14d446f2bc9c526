"""The groups that wait to be sampled; a group is whole once all its rollouts have been read."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from syncd.experience.model import Experience
from syncd.experience.table import rollouts
from syncd.protocol.documents import Fields
from trainer.experience.cursor import BatchFile, Origin
from trainer.experience.store import LoadedBatch

Key = tuple[str, str]  # explorer and group id: an explorer makes whole groups

RolloutRows = list[tuple[Origin, Experience]]
"""A rollout: origin and experience of each of its segments, in order."""


@dataclass(slots=True)
class RolloutGroup:
    """Rollouts that are compared with each other."""

    key: Key  # explorer and group id
    since: float  # when the first of them was read, on this host's clock
    members: dict[int, RolloutRows] = field(default_factory=dict)  # the rollouts by their numbers

    @property
    def rollouts(self) -> list[list[Experience]]:
        """Return its rollouts by their numbers, each with its segments."""
        return [[experience for _, experience in self.members[number]] for number in sorted(self.members)]

    @property
    def experiences(self) -> list[Experience]:
        return [experience for rollout in self.rollouts for experience in rollout]

    @property
    def origins(self) -> list[Origin]:
        """Return where they are stored, in the same order."""
        return [origin for number in sorted(self.members) for origin, _ in self.members[number]]


class GroupPool:
    """The waiting groups, in the order in which their first rollouts were read.

    A whole group has `size` rollouts; `counts` counts dropped rollouts by reason.
    """

    def __init__(self, size: int, counts: Counter[str]) -> None:
        self.size, self.counts = size, counts
        self.groups: dict[Key, RolloutGroup] = {}

    def add(self, loaded: LoadedBatch, now: float) -> None:
        """Add the rollouts of a batch; a second rollout of the same number is dropped."""
        rows = count()
        for segments in rollouts(loaded.experiences):
            member = [(Origin(*loaded.file, next(rows)), experience) for experience in segments]
            key = (loaded.file.explorer, segments[0].group)
            group = self.groups.setdefault(key, RolloutGroup(key, now))
            if segments[0].rollout in group.members or self.is_whole(group):
                self.counts["dropped_duplicate"] += 1
            else:
                group.members[segments[0].rollout] = member

    def is_whole(self, group: RolloutGroup) -> bool:
        return len(group.members) >= self.size

    def whole(self) -> list[RolloutGroup]:
        """Return the whole groups, oldest first."""
        return [group for group in self.groups.values() if self.is_whole(group)]

    def waiting(self, *, whole: bool) -> int:
        return sum(len(group.members) for group in self.groups.values() if self.is_whole(group) == whole)

    def drop(self, why: str, condition: Callable[[RolloutGroup], bool]) -> None:
        for key in [key for key, group in self.groups.items() if condition(group)]:
            self.counts[f"dropped_{why}"] += len(self.groups.pop(key).members)

    def remove(self, groups: Iterable[RolloutGroup]) -> None:
        for group in groups:
            del self.groups[group.key]


def group_document(group: RolloutGroup, now: float) -> dict[str, Any]:
    """Return a group as plain JSON: where its members are stored, and for how long it has waited."""
    return {
        "explorer": group.key[0],
        "group": group.key[1],
        "waited": round(now - group.since, 3),
        "members": [[origin.seq, origin.row] for origin in group.origins],
    }


def files_of(documents: Iterable[Fields]) -> Iterator[BatchFile]:
    for document in documents:
        yield from (BatchFile(document.text("explorer"), seq) for seq, _ in _members(document))


def load_groups(
    documents: Iterable[Fields], load: Callable[[BatchFile], tuple[Experience, ...] | None], now: float
) -> list[RolloutGroup]:
    """Return the groups of their documents, each batch read once; groups with a lost member are left out."""
    read: dict[BatchFile, tuple[Experience, ...] | None] = {}
    groups = []
    for document in documents:
        for file in files_of((document,)):
            if file not in read:
                read[file] = load(file)
        group = _group(document, read, now)
        if group is not None:
            groups.append(group)
    return groups


def _group(
    document: Fields, read: Mapping[BatchFile, tuple[Experience, ...] | None], now: float
) -> RolloutGroup | None:
    explorer = document.text("explorer")
    group = RolloutGroup((explorer, document.text("group")), now - document.number("waited"))
    for seq, row in _members(document):
        experiences = read[BatchFile(explorer, seq)] or ()
        if row >= len(experiences):
            return None
        member = group.members.setdefault(experiences[row].rollout, [])
        member.append((Origin(explorer, seq, row), experiences[row]))
    return group if all(map(_is_rollout, group.members.values())) else None


def _is_rollout(member: RolloutRows) -> bool:
    segments = [experience.segment for _, experience in member]
    return segments == list(range(member[0][1].segments))


def _members(document: Fields) -> list[tuple[int, int]]:
    members = document.items("members")
    for member in members:
        if type(member) is not list or [type(part) for part in member] != [int, int] or min(member) < 0:
            raise document.wrong("members", "a list of batch and row numbers")
    return [(seq, row) for seq, row in members]
