"""How long it takes until explorers have a step, by how it is stored: an estimate of what was measured last.

The trainer measures what it writes and what it takes to encode changes; explorers say in their presences what it took
to make a step whole on their host, or to put it into a model of their process. What nobody has measured yet follows
from the bandwidth of the trainer's writes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields

APPLY_RATE = 1.5e9
"""Bytes of whole files per second that a host makes of changes, until one has said what it took."""

STICKS = 0.9
"""Changes are stored once that takes less than this part of the time of whole weights, and the other way round."""


class TimedBytes(NamedTuple):
    """What it took one rank to write, or to encode, something."""

    size: int  # bytes
    seconds: float  # of the trainer's clock


class ShareTimes(NamedTuple):
    """What one rank has measured."""

    whole: TimedBytes | None = None  # its shard, when it was written last
    encoded: TimedBytes | None = None  # its shard, when its changes were encoded last
    container: TimedBytes | None = None  # these changes, when they were written


NOT_MEASURED = ShareTimes()


class ReaderTimes(NamedTuple):
    """What explorers need."""

    hosts: int = 1  # number of their hosts, which read at the same time
    # Seconds in which the slowest has its copy of a step that is stored whole, or a model filled with it;
    # None if unknown.
    whole: float | None = None
    changes: float | None = None  # the same of a delta


NOT_TOLD = ReaderTimes()


class StorageTimes(NamedTuple):
    """Seconds until explorers have the next step, by how it is stored."""

    whole: float
    shortcut: float
    delta: float

    def rounded(self) -> dict[str, float]:
        """Return them for an event."""
        return {f"{name}_seconds": round(seconds, 3) for name, seconds in self._asdict().items()}


def estimate(shares: Sequence[ShareTimes], readers: ReaderTimes) -> StorageTimes | None:
    """Return the estimate; None while a rank has not measured all of it."""
    wholes = [share.whole for share in shares if share.whole]
    encoded = [share.encoded for share in shares if share.encoded]
    containers = [share.container for share in shares if share.container]
    if not len(wholes) == len(encoded) == len(containers) == len(shares):
        return None
    write, encode, store = (max(one.seconds for one in each) for each in (wholes, encoded, containers))
    size, changes = sum(one.size for one in wholes), sum(one.size for one in containers)
    second = write / size if size else 0.0  # of a byte on the mount
    read = readers.hosts * size * second if readers.whole is None else readers.whole
    applied = size / APPLY_RATE + readers.hosts * changes * second
    applied = applied if readers.changes is None else readers.changes
    return StorageTimes(write + read, max(write, encode) + store + applied, encode + store + applied)


def reader_seconds(info: Mapping[str, object], step: int) -> float | None:
    """Return what an explorer's presence says that a step took it; None if it does not say.

    That is its host's copy, or where there is none, what it took to read the step and to fill a model with it.
    """
    try:
        fields = Fields(info, "info")
        loaded = fields.record("loaded")
        if loaded.integer("step") != step:
            return None
        has_copy = loaded.text("source", "stage") != "files"
        return fields.record("timings").number("stage") if has_copy else loaded.number("filled")
    except CorruptDataError:
        return None
