"""What the page is given: the documents of `status --json` and `ls --json`, cut to what a page can show.

docs/dashboard.md documents every field. A job directory may hold anything: lists, texts and numbers are bounded here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from syncd._version import __version__
from syncd.daemon.policy import Policy
from syncd.daemon.retention import Decision
from syncd.dashboard.watching import Known
from syncd.observe import names
from syncd.views import data
from syncd.views.listing import listing
from syncd.views.look import Look

Document = dict[str, Any]

MOST_ROWS = 200
"""Entries of a list at most."""

MOST_EVENTS = 30
MOST_TEXT = 500
_MOST_FIELDS = 100
_WORST = {"dead": 0, "unknown": 1, "alive": 2, "left": 3}
_QUIET = frozenset(
    {
        names.SCAN_COMPLETED,
        names.EXPLORER_LAG_CHANGED,
        names.STEP_PROGRESSED,
        names.STEP_FOUND,
        names.STEP_COMPLETED,
    }
    | {names.TRASH_EMPTIED}
)


def found(
    look: Look, decisions: Sequence[Decision], policy: Policy, events: Iterable[Mapping[str, Any]]
) -> Document:
    """Return what one look has found.

    Args:
        look: The look.
        decisions: What retention decides of each step.
        policy: By which policy.
        events: The newest of the daemon's journal, oldest first.
    """
    status, steps = data.status(look), listing(look, decisions, policy)
    left_out = {
        "steps": _beyond(steps["steps"]),
        "explorers": _beyond(status["explorers"]),
        "trainers": _beyond(status["trainers"]),
        "problems": _beyond(status["problems"]),
    }
    document = {
        "status": {**status, "explorers": _worst(status["explorers"])},
        "ls": {**steps, "steps": steps["steps"][::-1]},
        "rules": _rules(steps["steps"]),
        "events": _told(events),
        "left_out": left_out,
    }
    bounded: Document = _bounded(document)
    return bounded


def answer(known: Known, every: float) -> Document:
    """Return what the page is given now.

    Args:
        known: What is known.
        every: Seconds after which it is worth asking again.
    """
    serving = {
        "syncd": __version__,
        "every": every,
        "state": known.state.value,
        "at": known.at,
        "age": _rounded(known.age),
        "looking_for": _rounded(known.looking_for),
        "error": None
        if known.error is None
        else {"code": known.error.code, "message": str(known.error), "hint": known.error.hint},
    }
    nothing: Document = {"status": None, "ls": None, "rules": [], "events": [], "left_out": {}}
    return {"serving": _bounded(serving), **(known.document or nothing)}


def _worst(explorers: Sequence[Document]) -> list[Document]:
    """Return those that need to be seen, as many as are shown, in an order that stands still while they work."""
    shown = sorted(explorers, key=_attention)[:MOST_ROWS]
    return sorted(shown, key=lambda explorer: (_WORST[explorer["heart"]] != 0, explorer["id"]))


def _attention(explorer: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return what sorts those first that need to be seen first."""
    return _WORST[explorer["heart"]], -(explorer["lag"] or 0), explorer["id"]


def _beyond(rows: Sequence[object]) -> int:
    return max(len(rows) - MOST_ROWS, 0)


def _rules(rows: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return how many steps, and bytes, each rule keeps or removes; of all steps, shown or not."""
    sums: dict[tuple[bool, str], Document] = {}
    for row in rows:
        key = (row["keep"], row["rule"])
        total = sums.setdefault(key, {"rule": row["rule"], "keep": row["keep"], "steps": 0, "bytes": 0})
        total["steps"] += 1
        total["bytes"] += row["bytes"]
    return sorted(sums.values(), key=lambda total: (not total["keep"], -total["bytes"], total["rule"]))


def _told(events: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return the newest events that say what was decided, newest first; only what is documented of them."""
    told = [_plain(event) for event in events if _is_told(event)]
    return told[: -MOST_EVENTS - 1 : -1]


def _is_told(event: Mapping[str, Any]) -> bool:
    """Say whether it is worth a line: why each step stays is said beside the step."""
    return event["event"] in names.EVENTS - _QUIET and event.get("level") != "debug"


def _plain(event: Mapping[str, Any]) -> Document:
    return {key: value for key, value in event.items() if isinstance(value, str | int | float)}


def _bounded(value: Any) -> Any:
    """Return a value with no list, text or number that a page could not take."""
    if isinstance(value, dict):
        return {_bounded(key): _bounded(item) for key, item in list(value.items())[:_MOST_FIELDS]}
    if isinstance(value, list):
        return [_bounded(item) for item in value[:MOST_ROWS]]
    if isinstance(value, str):
        return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}..."
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
