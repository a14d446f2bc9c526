"""What a soak comes to: all figures, and under `wrong` everything that must not be."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soak import judging
from soak.bed import Bed
from soak.crew import EVENTS_BYTES
from soak.flat import is_flat, trend
from soak.plan import Plan
from soak.samples import ALLOWED, KEPT, Samples
from soak.schedule import DAEMONS, TRAINER

JUDGED_FROM = 300.0
"""Seconds of the second half from which on its growth says something: before, processes grow into their size."""

_LINE = 64 << 10
_TRASH, _STEPS = 60, 60

Line = dict[str, Any]


def lines(path: str) -> list[Line]:
    """Return the JSON lines of a file; a process that was killed may have left half a one."""
    found = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict) and "event" in document:
                    found.append(document)
    return found


def of_explorers(
    plan: Plan, where: Bed, disturbances: Sequence[judging.Disturbance]
) -> tuple[Line, list[str]]:
    """Return the figures of all explorers' journals, and what is wrong with them."""
    journals = {name: lines(where.journal(name)) for name in plan.names}
    loads = [
        judging.loads_of(name, journal, [one for one in disturbances if one.who == name], plan.ttl)
        for name, journal in journals.items()
    ]
    figures = {
        "loads": sum(one.loads for one in loads),
        "loaded_bytes": sum(one.bytes for one in loads),
        "excused": sum(one.excused for one in loads),
    }
    return figures, [wrong for one in loads for wrong in one.wrong]


def of_trainer(where: Bed) -> Line:
    """Return the figures of the trainer's journal."""
    events = [line["event"] for line in lines(where.journal(TRAINER))]
    names = {"announced": "announced", "rewinds": "rewound", "saves_failed": "failed"}
    return {shown: events.count(event) for shown, event in names.items()}


def of_daemons(where: Bed) -> tuple[Line, list[str]]:
    """Return the figures of the daemons' logs, and what is wrong with them."""
    logs = {name: lines(where.log(name)) for name in DAEMONS}
    events = [line["event"] for log in logs.values() for line in log]
    names = {
        "terms": "leadership_acquired",
        "fenced": "leadership_lost",
        "removed": "step_pruned",
        "mount_states": "mount_state_changed",
    }
    return {shown: events.count(event) for shown, event in names.items()}, judging.leaders(logs)


def of_samples(plan: Plan, samples: Samples) -> tuple[Line, list[str]]:
    """Return how each figure went in its second half, and which of them grew."""
    judged = {(name, what): most for name in plan.spared for what, most in ALLOWED.items()}
    judged |= {("job", what): most for what, most in KEPT.items()}
    shown, grown = {}, []
    for (name, what), most in judged.items():
        found = trend(samples.series[name, what])
        if found is None:
            continue
        shown[f"{name} {what}"] = [found.middle, round(found.growth, 1)]
        if found.seconds >= JUDGED_FROM and not is_flat(found, most):
            grown.append(f"{name} {what} grew by {found.growth:.0f} in {found.seconds:.0f} s")
    highest = {f"{name} {what}": value for (name, what), value in sorted(samples.highest.items())}
    return {"middle_and_growth": shown, "highest": highest}, grown + unbounded(samples.highest)


def unbounded(highest: Mapping[tuple[str, str], float]) -> list[str]:
    """Return which sizes of a job went over their bounds."""
    # A line that begins below the limit may end above it; there are three rotated files and the present one.
    longest = EVENTS_BYTES + _LINE
    bounds = {
        "events_longest": longest,
        "events_bytes": 4 * longest,
        "trash_steps": _TRASH,
        "steps": _STEPS,
    }
    reached = {what: highest.get(("job", what), 0.0) for what in bounds}
    over = {what: value for what, value in reached.items() if value > bounds[what]}
    return [f"{what} reached {value:g}, its bound is {bounds[what]}" for what, value in over.items()]


def tracebacks(where: Bed, names: Iterable[str]) -> list[str]:
    """Return the first traceback of each log that has one."""
    found = []
    for name in names:
        with open(where.log(name), encoding="utf-8", errors="replace") as file:
            text = file.read()
        at = text.find("Traceback (most recent call last)")
        found += [f"{name}: {text[at : at + 3000]}"] if at >= 0 else []
    return found
