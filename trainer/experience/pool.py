"""Groups that wait: taken in from batches, complete once all their rollouts are there."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from syncd.experience.model import Experience
from syncd.experience.rollouts import rollouts
from syncd.protocol.documents import Fields
from trainer.experience.cursor import File, Origin
from trainer.experience.store import Loaded

Key = tuple[str, str]
"""Explorer and group id: an explorer makes whole groups."""

Member = list[tuple[Origin, Experience]]
"""A rollout: origin and experience of each of its segments, in order."""


@dataclass(slots=True)
class Group:
    """Rollouts that are compared with each other.

    Args:
        key: Explorer and group id.
        since: When the first of them was taken in, on this host's clock.
        members: The rollouts by their numbers.
    """

    key: Key
    since: float
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[list[Experience]]:
        """Return its rollouts by their numbers, each with its segments."""
        return [[experience for _, experience in self.members[number]] for number in sorted(self.members)]

    @property
    def experiences(self) -> list[Experience]:
        """Return the segments of all its rollouts."""
        return [experience for rollout in self.rollouts for experience in rollout]

    @property
    def origins(self) -> list[Origin]:
        """Return where they are stored, in the same order."""
        return [origin for number in sorted(self.members) for origin, _ in self.members[number]]


class Pool:
    """The groups that wait, in the order in which the first of each was taken in.

    Args:
        size: Rollouts of a whole group.
        counts: Where it is counted what is dropped.
    """

    def __init__(self, size: int, counts: Counter[str]) -> None:
        self.size, self.counts = size, counts
        self.groups: dict[Key, Group] = {}

    def add(self, loaded: Loaded, now: float) -> None:
        """Take in a batch, whose rollouts are whole; of two of a number the first counts."""
        rows = count()
        for segments in rollouts(loaded.experiences):
            member = [(Origin(*loaded.file, next(rows)), experience) for experience in segments]
            key = (loaded.file.explorer, segments[0].group)
            group = self.groups.setdefault(key, Group(key, now))
            if segments[0].rollout in group.members or self.is_whole(group):
                self.counts["dropped_duplicate"] += 1
            else:
                group.members[segments[0].rollout] = member

    def is_whole(self, group: Group) -> bool:
        """Say whether all rollouts of a group are there."""
        return len(group.members) >= self.size

    def whole(self) -> list[Group]:
        """Return the whole groups, oldest first."""
        return [group for group in self.groups.values() if self.is_whole(group)]

    def waiting(self, *, whole: bool) -> int:
        """Return how many rollouts wait in whole groups, or in others."""
        return sum(len(group.members) for group in self.groups.values() if self.is_whole(group) == whole)

    def drop(self, why: str, condition: Callable[[Group], bool]) -> None:
        """Drop the groups of which a condition holds."""
        for key in [key for key, group in self.groups.items() if condition(group)]:
            self.counts[f"dropped_{why}"] += len(self.groups.pop(key).members)

    def take(self, groups: Iterable[Group]) -> None:
        """Remove groups that are used now."""
        for group in groups:
            del self.groups[group.key]


def group_document(group: Group, now: float) -> dict[str, Any]:
    """Return a group as plain JSON: where its members are stored, and for how long it has waited."""
    return {
        "explorer": group.key[0],
        "group": group.key[1],
        "waited": round(now - group.since, 3),
        "members": [[origin.seq, origin.row] for origin in group.origins],
    }


def files_of(documents: Iterable[Fields]) -> Iterator[File]:
    """Return the batches that group documents name."""
    for document in documents:
        yield from (File(document.text("explorer"), seq) for seq, _ in _members(document))


def load_groups(
    documents: Iterable[Fields], load: Callable[[File], tuple[Experience, ...] | None], now: float
) -> list[Group]:
    """Return the groups of their documents, each batch read once; one that has lost a member is left out."""
    read: dict[File, tuple[Experience, ...] | None] = {}
    groups = []
    for document in documents:
        for file in files_of((document,)):
            if file not in read:
                read[file] = load(file)
        group = _group(document, read, now)
        if group is not None:
            groups.append(group)
    return groups


def _group(document: Fields, read: Mapping[File, tuple[Experience, ...] | None], now: float) -> Group | None:
    explorer = document.text("explorer")
    group = Group((explorer, document.text("group")), now - document.number("waited"))
    for seq, row in _members(document):
        experiences = read[File(explorer, seq)] or ()
        if row >= len(experiences):
            return None
        member = group.members.setdefault(experiences[row].rollout, [])
        member.append((Origin(explorer, seq, row), experiences[row]))
    return group if all(map(_is_rollout, group.members.values())) else None


def _is_rollout(member: Member) -> bool:
    """Say whether all segments of a rollout are there, in order."""
    segments = [experience.segment for _, experience in member]
    return segments == list(range(member[0][1].segments))


def _members(document: Fields) -> list[tuple[int, int]]:
    members = document.items("members")
    for member in members:
        if type(member) is not list or [type(part) for part in member] != [int, int] or min(member) < 0:
            raise document.wrong("members", "a list of batch and row numbers")
    return [(seq, row) for seq, row in members]
