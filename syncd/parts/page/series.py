"""A series of values over time that never takes more than a bounded number of points.

Neighbours are merged as the series grows. Of each merged group the lowest and the highest value stay, and the first
that was not finite: a spike is seen however long the job runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_GROUPS = 150  # groups of neighbours in one series; each keeps at most three points


class Point(NamedTuple):
    """A value: seconds since the epoch, the trainer's step if it belongs to one, None if it is not finite."""

    at: float
    step: int | None
    value: float | None


@dataclass(slots=True)
class _Group:
    points: list[Point]
    count: int


class ThinnedSeries:
    """Points in the order in which they were added, thinned to `most` groups of neighbours, two at least."""

    def __init__(self, most: int = MOST_GROUPS) -> None:
        self._most, self._per_group = most, 1
        self._groups: list[_Group] = []
        self._last: Point | None = None

    @property
    def per_group(self) -> int:
        """Return of how many values at most two extremes are kept; 1 if every value is kept."""
        return self._per_group

    @property
    def last(self) -> Point | None:
        return self._last

    def add(self, point: Point) -> None:
        self._last = point
        if self._groups and self._groups[-1].count < self._per_group:
            self._groups[-1] = _merged(self._groups[-1], _Group([point], 1))
            return
        self._groups.append(_Group([point], 1))
        if len(self._groups) > self._most:
            self._halve()

    def drop_from(self, step: int) -> None:
        """Remove what is known of a step and of all later ones.

        If a group of neighbours has values on both sides of the step, only its extremes before the step stay.
        """
        while self._groups and self._last is not None and _is_from(self._last, step):
            kept = [point for point in self._groups[-1].points if not _is_from(point, step)]
            group = self._groups.pop()
            if kept:
                self._groups.append(_Group(kept, group.count))
            self._last = self._groups[-1].points[-1] if self._groups else None

    def points(self) -> list[Point]:
        """Return the points that stand for the series, the newest one always among them."""
        points = [point for group in self._groups for point in group.points]
        return points if self._last is None or points[-1] is self._last else [*points, self._last]

    def _halve(self) -> None:
        pairs = [self._groups[start : start + 2] for start in range(0, len(self._groups), 2)]
        self._groups = [_merged(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
        self._per_group *= 2


def _is_from(point: Point, step: int) -> bool:
    return point.step is not None and point.step >= step


def _merged(first: _Group, second: _Group) -> _Group:
    return _Group(_extremes([*first.points, *second.points]), first.count + second.count)


def _extremes(points: Sequence[Point]) -> list[Point]:
    """Return the lowest and the highest point, and the first that is not finite, in their order."""
    values = {position: point.value for position, point in enumerate(points) if point.value is not None}
    chosen = {min(values, key=values.__getitem__), max(values, key=values.__getitem__)} if values else set()
    odd = next((position for position, point in enumerate(points) if point.value is None), None)
    return [points[position] for position in sorted(chosen | ({odd} if odd is not None else set()))]
