"""How the next step is stored: whole, or as the changes of the last one. Pure functions over what rank 0 knows.

A step that is stored whole may have a shortcut: the changes of the last one beside it. docs/delta.md has the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncd.protocol.receipt import FileRecord
from syncd.transports.files.storage_times import (
    NOT_MEASURED,
    NOT_TOLD,
    STICKS,
    ReaderTimes,
    ShareTimes,
    StorageTimes,
    estimate,
)
from syncd.transports.keyframes import KEYFRAME_EVERY, LARGEST_SHARE, ChainLength, chain_problem, is_too_large

AGAIN = 16
"""Steps after which changes that did not pay are stored again, as a shortcut, to see what they take now."""


_ALL_READ = "every explorer reads deltas"
_STAGE_HINT = (
    'give an explorer a stage that has room: [explorer.follow] stage = "/dev/shm/syncd", or'
    " syncd follow JOB --hook HOOK --stage /dev/shm/syncd"
)
_SLOWER = "explorers have whole weights earlier than changes"


@dataclass(frozen=True, slots=True)
class ShareState:
    """What one rank knows before a step is stored."""

    sealed: tuple[int, str] | None  # step and attempt of the share that it has kept; None if it has none
    why: str  # why it has kept none
    is_same_layout: bool  # whether the share to be stored has the layout of the one that was kept
    whole: int  # bytes of its shard
    times: ShareTimes = NOT_MEASURED  # what it has measured
    encoded_ago: int = 0  # steps since it has stored changes


@dataclass(frozen=True, slots=True)
class Parent:
    """The last sealed step, as it is in the job now."""

    step: int
    digest: str  # of its manifest
    files: tuple[FileRecord, ...]  # the records of its files beside the weights
    chain: ChainLength


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """What is known before a step is stored."""

    shares: Sequence[ShareState]  # what each rank knows
    parent: Parent | None = None  # the last sealed step; None if it is not usable
    why_no_parent: str = ""  # why it is not
    must_be_whole: str = ""  # why this step must be whole whatever would be shorter; empty if it need not
    readers: int = 0  # living explorers that read deltas
    unable: str = ""  # a living explorer that reads none; empty if all do
    every: int = KEYFRAME_EVERY  # the most deltas after a keyframe
    limit: int = 0  # the most bytes of them; 0 for a share of a whole step
    # Whether changes are stored only where explorers have them earlier than whole weights.
    weighs_time: bool = False
    readers_times: ReaderTimes = NOT_TOLD  # what explorers need
    was_slower: bool = True  # whether changes would have taken longer the last time


@dataclass(frozen=True, slots=True)
class Storage:
    """How a step is stored."""

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
        """Return how the step is stored in one word: `whole`, `shortcut` or `delta`."""
        if self.parent is None:
            return "whole"
        return "delta" if self.is_delta else "shortcut"


WHOLE = Storage()


def choose_storage(now: StorageFacts) -> Storage:
    """Return how the next step is stored."""
    if not now.readers:
        return Storage(why="no living explorer reads deltas", hint=_STAGE_HINT if now.unable else "")
    if now.parent is None:
        return Storage(keeps=True, why=now.why_no_parent)
    if problem := _no_changes(now.shares):
        return Storage(keeps=True, why=problem)
    times = estimate([share.times for share in now.shares], now.readers_times) if now.weighs_time else None
    is_slower = now.was_slower if times is None else _is_slower(times, was_slower=now.was_slower)
    why = _why_whole(now, now.parent) or (_SLOWER if times and is_slower else "")
    is_delta, found = not why, Storage(keeps=True, why=why or _ALL_READ, times=times, is_slower=is_slower)
    if is_delta or times is None or _pays(now, times, is_slower=is_slower):
        return replace(found, parent=now.parent, is_delta=is_delta)
    return found


def _pays(now: StorageFacts, times: StorageTimes, *, is_slower: bool) -> bool:
    """Return whether a step that is whole gets a shortcut: it is quicker to read, or shows what changes take now."""
    if max(share.encoded_ago for share in now.shares) >= AGAIN:
        return True
    return not is_slower and times.shortcut <= times.whole


def _is_slower(times: StorageTimes, *, was_slower: bool) -> bool:
    """Return whether a delta takes longer than a whole step; a change of the answer is by more than noise."""
    return times.delta > STICKS * times.whole if was_slower else STICKS * times.delta > times.whole


def _no_changes(shares: Sequence[ShareState]) -> str:
    """Return why no changes are stored, not even as a shortcut; empty where they may be."""
    if missing := next((share.why for share in shares if share.sealed is None), ""):
        return missing
    if len({share.sealed for share in shares}) > 1:
        return "the ranks have kept different steps"
    if not all(share.is_same_layout for share in shares):
        return "its shard files have other headers than those of the step before"
    size, whole = _measured(shares)
    if is_too_large(size, whole) and max(share.encoded_ago for share in shares) < AGAIN:
        return f"the last changes took more than {LARGEST_SHARE:.0%} of a whole step"
    return ""


def _why_whole(now: StorageFacts, parent: Parent) -> str:
    """Return why a step is whole though its changes are stored too, empty where it need not be."""
    if now.must_be_whole:
        return now.must_be_whole
    if now.unable:
        return f"explorer {now.unable} reads no deltas"
    if any(share.times.container is None for share in now.shares):
        return "the share of changes is not known yet"
    if is_too_large(*_measured(now.shares)):
        return f"{AGAIN} steps ago changes took more than {LARGEST_SHARE:.0%} of a whole step"
    return chain_problem(parent.chain, sum(share.whole for share in now.shares), now.every, now.limit)


def _measured(shares: Sequence[ShareState]) -> tuple[int, int]:
    """Return the bytes of the last changes, and of the shards that they make."""
    containers = [share.times.container.size for share in shares if share.times.container]
    return sum(containers), sum(share.times.encoded.size for share in shares if share.times.encoded)
