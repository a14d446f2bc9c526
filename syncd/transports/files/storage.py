"""How a step is stored: whole, or as the changes of the last one; and what a rank says of its share before that.

`syncd.transports.delta` chooses. A step that is stored whole may have a shortcut: the changes of the last one beside
it. docs/delta.md has the rules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from syncd.protocol.delta import Frame
from syncd.protocol.receipt import FileRecord


class TimedBytes(NamedTuple):
    """What it took one rank to write, or to encode, something.

    Args:
        size: Bytes.
        seconds: Of the trainer's clock.
    """

    size: int
    seconds: float


class ShareTimes(NamedTuple):
    """What one rank has measured.

    Args:
        whole: Its shard, when it was written last.
        encoded: Its shard, when its changes were encoded last.
        container: These changes, when they were written.
    """

    whole: TimedBytes | None = None
    encoded: TimedBytes | None = None
    container: TimedBytes | None = None


NOT_MEASURED = ShareTimes()


@dataclass(frozen=True, slots=True)
class ShareState:
    """What one rank knows before a step is stored.

    Args:
        sealed: Step and attempt of the share that it has kept; None if it has none.
        why: Why it has kept none.
        is_same_layout: Whether the share to be stored has the layout of the one that was kept.
        whole: Bytes of its shard.
        times: What it has measured.
        encoded_ago: Steps since it has stored changes.
    """

    sealed: tuple[int, str] | None
    why: str
    is_same_layout: bool
    whole: int
    times: ShareTimes = NOT_MEASURED
    encoded_ago: int = 0


class ChainLength(NamedTuple):
    """What lies between a step and its keyframe.

    Args:
        keyframe: The step that is stored whole.
        deltas: Number of deltas after it, the step itself included.
        size: Bytes of these deltas.
    """

    keyframe: int
    deltas: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Parent:
    """The last sealed step, as it is in the job now.

    Args:
        step: The step.
        digest: Of its manifest.
        files: The records of its files beside the weights.
        chain: Its chain.
    """

    step: int
    digest: str
    files: tuple[FileRecord, ...]
    chain: ChainLength


class StorageTimes(NamedTuple):
    """Seconds until explorers have the next step, by how it is stored."""

    whole: float
    shortcut: float
    delta: float

    def rounded(self) -> dict[str, float]:
        """Return them for an event."""
        return {f"{name}_seconds": round(seconds, 3) for name, seconds in self._asdict().items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """How a step is stored.

    Args:
        parent: The step whose changes are stored; None if none are.
        is_delta: Whether they are all that is stored of the weights; if not, they are a shortcut.
        keeps: Whether each rank keeps its share, so that the next step can be stored as changes of this one.
        why: Why the step is stored so.
        times: What was expected; None if not all of it was measured.
        is_slower: Whether changes would take longer than whole weights.
        hint: What makes explorers read deltas; empty where they do, or where there is none.
    """

    parent: Parent | None = None
    is_delta: bool = False
    keeps: bool = False
    why: str = ""
    times: StorageTimes | None = None
    is_slower: bool = True
    hint: str = ""

    @property
    def form(self) -> str:
        """Return how the step is stored in one word: `whole`, `shortcut` or `delta`."""
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
