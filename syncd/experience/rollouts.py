"""Which rows of a batch are one rollout: its segments stand one after the other, in order, and all of them."""

from collections import deque
from collections.abc import Iterator, Sequence

from syncd.errors import UsageError
from syncd.experience.model import Experience, check_total

_SHARED = ("segments", "group", "task", "rollout", "reward")


def rollouts(experiences: Sequence[Experience]) -> Iterator[tuple[Experience, ...]]:
    """Yield the rollouts of a batch, each with all its segments.

    Raises:
        UsageError: One is not whole, or its segments contradict each other; the message names row and field.
    """
    start = 0
    while start < len(experiences):
        first = experiences[start]
        if first.segments == 1:
            yield (first,)
        else:
            segments = tuple(experiences[start : start + first.segments])
            _check(segments, start)
            yield segments
        start += first.segments


def check_rollouts(experiences: Sequence[Experience]) -> None:
    """Refuse a batch with a rollout that is not whole.

    Raises:
        UsageError: As above.
    """
    if any(one.segments > 1 for one in experiences):
        deque(rollouts(experiences), maxlen=0)


def _check(segments: Sequence[Experience], start: int) -> None:
    first = segments[0]
    for place, row in enumerate(segments):
        if row.segment != place:
            raise UsageError(
                f"row {start + place}: segment is {row.segment} where {place} of {first.segments} is due: "
                "a rollout's segments are all in one batch, one after the other"
            )
        for name in _SHARED:
            if getattr(row, name) != getattr(first, name):
                raise UsageError(f"row {start + place}: {name} is not that of the rollout's first segment")
    if len(segments) < first.segments:
        raise UsageError(
            f"row {start}: segments: the rollout has {len(segments)} of its {first.segments} segments here"
        )
    try:
        check_total(segments)
    except UsageError as error:
        raise UsageError(f"row {start} is {error.message}") from None
