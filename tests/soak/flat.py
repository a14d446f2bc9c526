"""Whether a figure stays where it is: what a process needs, what a directory holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

Series = Sequence[tuple[float, float]]
"""Points (seconds, value), in order."""

_MOST = 150


@dataclass(frozen=True)
class Trend:
    """The second half of a series.

    Args:
        seconds: How long it is.
        middle: Its median.
        highest: Of the whole series.
        growth: By how much it grows from its beginning to its end, by the median of all slopes: a few points that
            lie anywhere change nothing.
    """

    seconds: float
    middle: float
    highest: float
    growth: float


def trend(series: Series) -> Trend | None:
    """Return the trend of a series, None of one with fewer than four points."""
    if len(series) < 4:
        return None
    middle = (series[0][0] + series[-1][0]) / 2
    half = [point for point in series if point[0] >= middle]
    seconds = half[-1][0] - half[0][0]
    highest = max(value for _, value in series)
    return Trend(seconds, median(value for _, value in half), highest, _slope(_thinned(half)) * seconds)


def is_flat(found: Trend, allowance: float) -> bool:
    """Say whether it has grown by no more than an allowance."""
    return found.growth <= allowance


def _thinned(series: Series) -> Series:
    return series[:: len(series) // _MOST + 1]


def _slope(series: Series) -> float:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(series, 2) if b[0] > a[0]]
    return median(slopes) if slopes else 0.0
