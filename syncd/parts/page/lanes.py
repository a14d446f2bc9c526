"""Which version each explorer ran when, as the daemon's journal says it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from syncd.observe import event_names

MOST_LANES = 40  # explorers in the answer: those that live first, then those that went last
MOST_SPANS = 150  # versions of one explorer, the newest ones
MOST_KNOWN = 512  # explorers that are remembered; if there are more, those that went first are forgotten
REPORTED_WITHIN = 10.0  # seconds in which a new leader has reported every explorer

MOST_QUARANTINED = 200
_LONGEST = 100


@dataclass(slots=True)
class _Span:
    since: float
    until: float | None
    generation: int | None
    step: int | None
    state: str | None


@dataclass(slots=True)
class _Lane:
    spans: deque[_Span] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))
    gone: str | None = None
    at: float = 0.0

    def add(self, span: _Span) -> None:
        """Add what the explorer runs from now on; what a new leader reports again changes nothing."""
        last = self.spans[-1] if self.spans else None
        self.gone, self.at = None, span.since
        if last is not None and last.until is None:
            if (last.generation, last.step, last.state) == (span.generation, span.step, span.state):
                return
            last.until = span.since
        self.spans.append(span)

    def has_reached(self, generation: int, step: int) -> bool:
        """Return whether the explorer runs this version, or one that came after it."""
        last = self.spans[-1] if self.spans else None
        return last is not None and (generation, step) <= (last.generation or 0, last.step or 0)


class LaneCollector:
    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._quarantined: deque[int] = deque(maxlen=MOST_QUARANTINED)
        self._newest = self._led_at = 0.0
        self._unconfirmed: set[str] = set()

    def add(self, event: str, at: float, document: Mapping[str, Any]) -> None:
        """Take an event of a time in seconds since the epoch; `document`, its whole line, may hold anything."""
        self._newest = max(self._newest, at)
        if self._unconfirmed and at > self._led_at + REPORTED_WITHIN:
            for unseen in self._unconfirmed:
                self._ended(self._led_at, unseen, "gone")
            self._unconfirmed = set()
        if event == event_names.LEADERSHIP_ACQUIRED:
            self._unconfirmed, self._led_at = (
                {name for name, lane in self._lanes.items() if not lane.gone},
                at,
            )
        elif event == event_names.VERSIONS_APPLIED:
            for kind, take in (("recent", self._passed), ("explorers", self._applied)):
                rows = document.get(kind)
                for row in rows if isinstance(rows, list) else ():
                    take(at, row)
        elif event == event_names.STEP_QUARANTINED and type(document.get("step")) is int:
            self._quarantined.append(document["step"])
        elif event in _GONE and isinstance(explorer := document.get("explorer"), str):
            self._ended(at, explorer, _GONE[event])

    def document(self) -> dict[str, Any]:
        order = sorted(self._lanes.items(), key=lambda item: (item[1].gone is not None, -item[1].at))
        shown = sorted(order[:MOST_LANES], key=lambda item: item[0])
        return {
            "lanes": [_lane(name, lane) for name, lane in shown],
            "left_out": len(order) - len(shown),
            "quarantined": sorted(set(self._quarantined)),
            "until": self._newest or None,
        }

    def _applied(self, at: float, row: object) -> None:
        if not isinstance(row, list) or len(row) != _FIELDS or not isinstance(row[0], str):
            return
        name, generation, step, state = row
        if type(generation) is not int or type(step) is not int:
            generation = step = None
        self._lane(name).add(_Span(at, None, generation, step, _text(state)))
        self._unconfirmed.discard(name[:_LONGEST])
        self._forget()

    def _passed(self, at: float, row: object) -> None:
        """Take a version that came some seconds before the event; a new leader may tell what is known."""
        match row:
            case [str(name), int(generation), int(step), state, int() | float() as ago] if (
                0 <= ago <= _OLDEST
            ):
                lane = self._lane(name)
                is_repeated = name[:_LONGEST] in self._unconfirmed and lane.has_reached(generation, step)
                if not is_repeated:
                    lane.add(_Span(max(at - ago, lane.at), None, generation, step, _text(state)))
                self._forget()

    def _lane(self, name: str) -> _Lane:
        """Return the lane of an explorer, which is then the last that had news."""
        lane = self._lanes.pop(name[:_LONGEST], None) or _Lane()
        self._lanes[name[:_LONGEST]] = lane
        return lane

    def _ended(self, at: float, name: str, how: str) -> None:
        lane = self._lanes.get(name[:_LONGEST])
        if lane is not None and lane.gone is None:
            lane.gone, lane.at = how, at
            lane.spans[-1].until = at

    def _forget(self) -> None:
        """Forget the lane that has been without news for longest, one that is gone if there is one."""
        if len(self._lanes) > MOST_KNOWN:
            gone = next((name for name, lane in self._lanes.items() if lane.gone is not None), None)
            self._lanes.pop(gone if gone is not None else next(iter(self._lanes)))


def _text(state: object) -> str | None:
    return state[:_LONGEST] if isinstance(state, str) else None


_FIELDS = 4
_OLDEST = 3600.0
"""Seconds that a version may have come before the event that tells it; more is a clock that was set."""

_GONE: Mapping[str, str] = {event_names.EXPLORER_LEFT: "left", event_names.EXPLORER_DIED: "dead"}


def _lane(name: str, lane: _Lane) -> dict[str, Any]:
    spans = [[span.since, span.until, span.generation, span.step, span.state] for span in lane.spans]
    return {"explorer": name, "gone": lane.gone, "spans": spans}
