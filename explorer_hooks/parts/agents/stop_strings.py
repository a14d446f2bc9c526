"""Where an answer ends that comes to a string at which the agent wants it to stop.

The record keeps whole tokens: those up to the one with which the string is complete. They are trained, as the model
drew them. The agent gets the text before the string. What the engine drew behind that token is forgotten.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple


class StopCut(NamedTuple):
    """An answer up to a stop: how many of its tokens are kept, and its text before the string."""

    tokens: int
    text: str


def cut_at_stop(
    tokens: Sequence[int], stop: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> StopCut | None:
    """Return an answer, without the token that ends it, up to the first stop string in it; None if it has none."""

    def first_stop(count: int) -> int:
        """Return where the first string begins in the text of so many tokens, -1 if none is in it."""
        text = text_of(tokens[:count])
        return min((at for string in stop if (at := text.find(string)) >= 0), default=-1)

    if not stop or first_stop(len(tokens)) < 0:
        return None
    count = bisect_left(range(len(tokens)), 0, key=first_stop)
    return StopCut(count, text_of(tokens[:count])[: first_stop(count)])
