"""How a step is stored: whole, or as the changes of the last one; and what a rank says of its share before that.

`syncd.transports.delta` chooses. A step that is stored whole may have a shortcut: the changes of the last one beside
it. docs/large-models.md has the rules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from syncd.protocol.delta import Frame
from syncd.protocol.receipt import FileRecord


class TimedBytes(NamedTuple):
    size: int  # bytes
    seconds: float  # of the trainer's clock


class ShareTimes(NamedTuple):
    whole: TimedBytes | None = None  # its shard, when it was written last
    encoded: TimedBytes | None = None  # its shard, when its changes were encoded last
    container: TimedBytes | None = None  # these changes, when they were written


NOT_MEASURED = ShareTimes()


@dataclass(frozen=True, slots=True)
class ShareState:
    sealed: tuple[int, str] | None  # step and attempt of the share that it has kept; None if it has none
    why: str  # why it has kept none
    is_same_layout: bool  # whether the share to be stored has the layout of the one that was kept
    whole: int  # bytes of its shard
    times: ShareTimes = NOT_MEASURED  # what it has measured
    encoded_ago: int = 0  # steps since it has stored changes


class ChainLength(NamedTuple):
    """What lies between a step and its keyframe."""

    keyframe: int  # the step that is stored whole
    deltas: int = 0  # number of deltas after it, the step itself included
    size: int = 0  # bytes of these deltas


@dataclass(frozen=True, slots=True)
class Parent:
    step: int
    digest: str  # of its manifest
    files: tuple[FileRecord, ...]  # the records of its files beside the weights
    chain: ChainLength


class StorageTimes(NamedTuple):
    """Seconds until explorers have the next step, by how it is stored."""

    whole: float
    shortcut: float
    delta: float

    def rounded(self) -> dict[str, float]:
        return {f"{name}_seconds": round(seconds, 3) for name, seconds in self._asdict().items()}


@dataclass(frozen=True, slots=True)
class Storage:
    parent: Parent | None = None  # the step whose changes are stored; None if none are
    is_delta: bool = False  # whether they are all that is stored of the weights; if not, they are a shortcut
    # Whether each rank keeps its share, so that the next step can be stored as changes of this one.
    keeps: bool = False
    why: str = ""  # why the step is stored so
    times: StorageTimes | None = None  # what was expected; None if not all of it was measured
    is_slower: bool = True  # whether changes would take longer than whole weights
    hint: str = ""  # what makes explorers read deltas; empty where they do, or where there is none

    @property
    def form(self) -> str:
        if self.parent is None:
            return "whole"
        return "delta" if self.is_delta else "shortcut"


WHOLE = Storage()


class ShardChanges(Protocol):
    """The changes of one rank's share, encoded: `syncd.transports.delta.container.NewContainer`."""

    frames: list[Frame]

    def pieces(self) -> Iterator[bytes]:
        """Yield the file that holds them."""
        ...

    def close(self) -> None:
        """Give up their memory."""


class ChoosesStorage(Protocol):
    """Rank 0's choice how each step is stored: `syncd.transports.delta.storage_chooser.StorageChooser`."""

    def begin(self, share: ShareState) -> None:
        """Begin to read the job, for a choice that follows once all shares are copied."""

    def next_storage(self, step: int, shares: Sequence[ShareState], must_be_whole: str) -> Storage:
        """Return how a step is stored."""
        ...

    def note_failure(self) -> None:
        """Have the next step stored whole: a save has failed."""

    def release(self) -> None:
        """Let the step go that the last one is stored as changes of."""

    def close(self) -> None:
        """End what runs."""
