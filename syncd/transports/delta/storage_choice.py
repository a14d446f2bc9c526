"""How the next step is stored: whole, or as the changes of the last one. Pure functions over what rank 0 knows.

docs/large-models.md has the rules. What `sync.delta = "auto"` weighs is how long it takes until explorers have the
step, estimated from what was measured last: the trainer measures what it writes and what it takes to encode changes;
explorers say in their presences what it took to make a step whole on their host, or to put it into a model of their
process. What nobody has measured yet follows from the bandwidth of the trainer's writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields
from syncd.transports.delta.keyframes import KEYFRAME_EVERY, LARGEST_SHARE, chain_problem, is_too_large
from syncd.transports.files.storage import Parent, ShareState, ShareTimes, Storage, StorageTimes
from syncd.transports.measured import AGAIN, fastest, load_of

APPLY_RATE = 1.5e9
"""Bytes of whole files per second that a host makes of changes, until one has said what it took."""

_ALL_READ = "every explorer reads deltas"
_STAGE_HINT = (
    'give an explorer a stage that has room: [explorer.follow] stage = "/dev/shm/syncd", or'
    " syncd follow JOB --hook HOOK --stage /dev/shm/syncd"
)
_SLOWER = "explorers have whole weights earlier than changes"


class ReaderTimes(NamedTuple):
    hosts: int = 1  # number of their hosts, which read at the same time
    # Seconds in which the slowest has its copy of a step that is stored whole, or a model filled with it;
    # None if unknown.
    whole: float | None = None
    changes: float | None = None  # the same of a delta


NOT_TOLD = ReaderTimes()


@dataclass(frozen=True, slots=True)
class StorageFacts:
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


def choose_storage(now: StorageFacts) -> Storage:
    if not now.readers:
        return Storage(why="no living explorer reads deltas", hint=_STAGE_HINT if now.unable else "")
    if now.parent is None:
        return Storage(keeps=True, why=now.why_no_parent)
    if problem := _no_changes(now.shares):
        return Storage(keeps=True, why=problem)
    times = estimate([share.times for share in now.shares], now.readers_times) if now.weighs_time else None
    is_slower = now.was_slower if times is None else _is_slower(times, was_slower=now.was_slower)
    why = _why_whole(now, now.parent) or (_SLOWER if times and is_slower else "")
    is_delta, whole = not why, Storage(keeps=True, why=why or _ALL_READ, times=times, is_slower=is_slower)
    if is_delta or times is None or _pays(now, times, is_slower=is_slower):
        return replace(whole, parent=now.parent, is_delta=is_delta)
    return whole


def _pays(now: StorageFacts, times: StorageTimes, *, is_slower: bool) -> bool:
    """Return whether a step that is whole gets a shortcut: it is quicker to read, or shows what changes take now."""
    if max(share.encoded_ago for share in now.shares) >= AGAIN:
        return True
    return not is_slower and times.shortcut <= times.whole


def _is_slower(times: StorageTimes, *, was_slower: bool) -> bool:
    """Return whether a delta takes longer than a whole step; a change of the answer is by more than noise."""
    expected = {"whole": times.whole, "delta": times.delta}
    return fastest(expected, "whole" if was_slower else "delta") == "whole"


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


def estimate(shares: Sequence[ShareTimes], readers: ReaderTimes) -> StorageTimes | None:
    """Return the estimate; None while a rank has not measured all of it."""
    wholes = [share.whole for share in shares if share.whole]
    encoded = [share.encoded for share in shares if share.encoded]
    containers = [share.container for share in shares if share.container]
    if not len(wholes) == len(encoded) == len(containers) == len(shares):
        return None
    write, encode, store = (max(part.seconds for part in each) for each in (wholes, encoded, containers))
    size, changes = sum(part.size for part in wholes), sum(part.size for part in containers)
    second = write / size if size else 0.0  # of a byte on the mount
    read = readers.hosts * size * second if readers.whole is None else readers.whole
    applied = size / APPLY_RATE + readers.hosts * changes * second
    applied = applied if readers.changes is None else readers.changes
    return StorageTimes(write + read, max(write, encode) + store + applied, encode + store + applied)


def reader_seconds(info: Mapping[str, Any], step: int) -> float | None:
    """Return what an explorer's presence says that a step took it; None if it does not say.

    That is its host's copy, or where there is none, what it took to read the step and to fill a model with it.
    """
    load = load_of(info)
    if load is None or load.step != step:
        return None
    if load.source == "files":
        return load.filled
    try:
        return Fields(info, "info").record("timings").number("stage")
    except CorruptDataError:
        return None
