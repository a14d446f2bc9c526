"""The data of the page: the documents of `status --json` and `ls --json`, cut to what a page can show.

docs/json.md documents every field. A job directory may hold anything: lists, texts and numbers are bounded here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any

from syncd._version import __version__
from syncd.config import DaemonConfig
from syncd.daemon.retention import Decision, decide
from syncd.errors import ConfigError, StorageError
from syncd.observe import event_names
from syncd.observe.journal import first_event_at, read_events
from syncd.parts.page.poller import PollResult
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.views import documents
from syncd.views.job_view import JobView, JobViewer
from syncd.views.listing import listing

Document = dict[str, Any]

MOST_ROWS = 200  # entries of a list at most

MOST_EVENTS = 30
MOST_TEXT = 500
_MOST_READ = 400  # newest events of the journal, from which those to show are taken
_LONG_RUN = 3  # events of a kind in a row from which they are shown as one entry

_COMINGS = frozenset({event_names.EXPLORER_JOINED, event_names.EXPLORER_LEFT, event_names.EXPLORER_DIED})

_MOST_FIELDS = 100
_MOST_LEVELS = 50
_WORST = {"dead": 0, "unknown": 1, "alive": 2, "left": 3}
_QUIET = frozenset(
    {
        event_names.SCAN_COMPLETED,
        event_names.EXPLORER_LAG_CHANGED,
        event_names.ENGINE_REPORTED,
        event_names.VERSIONS_APPLIED,
        event_names.STEP_PROGRESSED,
        event_names.STEP_FOUND,
        event_names.STEP_COMPLETED,
        event_names.TRASH_EMPTIED,
    }
)


class PageReader:
    """Reads a job for the page. Opening the job is part of it, because its mount may not answer."""

    def __init__(
        self, open_job: Callable[[], Job], rules: Callable[[Job], DaemonConfig], clock: Clock
    ) -> None:
        self._open, self._rules, self._clock = open_job, rules, clock
        self._job: Job | None = None
        self._viewer: JobViewer | None = None
        self._policy: DaemonConfig | None = None
        self._policy_problem = ""
        self._began: float | None = None

    def __call__(self) -> dict[str, Any]:
        self._job = self._job or self._open()
        policy = self._read_policy(self._job)
        # As the daemon, whose `ttl` only a start can change.
        self._viewer = self._viewer or JobViewer(self._job, self._clock, policy.ttl, policy.takeover)
        view = self._viewer.read()
        if self._policy_problem:
            view = replace(view, problems={**view.problems, "config": self._policy_problem})
        events = read_events(self._job.events, _MOST_READ)
        return {**view_document(view, decide(view.scanned, policy), policy, events), "ran": self._ran(view)}

    def _ran(self, view: JobView) -> float | None:
        """Return the seconds from the daemon's first event to the last version of a job that has finished."""
        version = view.snapshot.version
        if view.end is None or version is None:
            return None
        self._began = self._began or first_event_at(view.job.events)
        return None if self._began is None else _rounded(max(version.published_at - self._began, 0.0))

    def _read_policy(self, job: Job) -> DaemonConfig:
        """Return the policy; if it has become unreadable, show that as a problem and keep the last one."""
        try:
            self._policy, self._policy_problem = self._rules(job), ""
        except (ConfigError, StorageError) as error:
            if self._policy is None:
                raise
            self._policy_problem = str(error)
        return self._policy


def view_document(
    view: JobView, decisions: Sequence[Decision], policy: DaemonConfig, events: Iterable[Mapping[str, Any]]
) -> Document:
    """Return the data of one view of the job; `events` are the newest of the daemon's journal, oldest first."""
    status, steps = documents.status(view), listing(view, decisions, policy)
    lists = {
        "steps": steps["steps"],
        **{name: status[name] for name in ("explorers", "trainers", "problems")},
    }
    document: Document = bounded(
        {
            "status": {**status, "explorers": _worst(status["explorers"])},
            "ls": {**steps, "steps": steps["steps"][::-1]},
            "rules": _rules(steps["steps"]),
            "events": _decisive(events),
            "left_out": {name: max(len(rows) - MOST_ROWS, 0) for name, rows in lists.items()},
        }
    )
    return document


def answer(poll: PollResult, every: float, overview: str | None = None) -> Document:
    """Return what the page gets now: it asks again after `every` seconds, and `overview` is where all jobs are."""
    nothing: Document = {"status": None, "ls": None, "rules": [], "events": [], "left_out": {}, "ran": None}
    return {
        "schema_version": documents.STATUS_SCHEMA,
        "serving": {**serving(poll, every), "overview": overview},
        **(poll.document or nothing),
    }


def serving(poll: PollResult, every: float) -> Document:
    """Return what each answer says of this server and of its latest poll; arguments as of `answer`."""
    state: Document = bounded({"syncd": __version__, "every": every, **poll_state(poll)})
    return state


def poll_state(poll: PollResult) -> Document:
    """Return the state of a poll, and when what is known was read."""
    error = poll.error
    return {
        "state": poll.state.value,
        "at": poll.at,
        "age": _rounded(poll.age),
        "looking_for": _rounded(poll.looking_for),
        "error": error and {"code": error.code, "message": str(error), "hint": error.hint},
    }


def _worst(explorers: Sequence[Document]) -> list[Document]:
    """Return the explorers to show, dead ones first, in an order that does not change while they work."""
    trouble_first = sorted(explorers, key=_attention)
    return sorted(
        trouble_first[:MOST_ROWS], key=lambda explorer: (_WORST[explorer["heart"]] != 0, explorer["id"])
    )


def _attention(explorer: Document) -> tuple[int, bool, int, str]:
    heart = _WORST[explorer["heart"]]
    return heart, not documents.has_engine_trouble(explorer), -(explorer["lag"] or 0), explorer["id"]


def _rules(rows: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return how many steps and bytes each rule keeps or removes, counting the steps that are not shown too."""
    sums: dict[tuple[bool, str], Document] = {}
    for row in rows:
        key = (row["keep"], row["rule"])
        total = sums.setdefault(key, {"rule": row["rule"], "keep": row["keep"], "steps": 0, "bytes": 0})
        total["steps"] += 1
        total["bytes"] += row["bytes"]
    return sorted(sums.values(), key=lambda total: (not total["keep"], -total["bytes"], total["rule"]))


def _decisive(events: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return the newest events that report a decision, newest first, with their documented fields.

    Versions and removals in a row are one entry, and so are explorers that join, leave or die in a row.
    """
    shown = [
        {key: value for key, value in event.items() if isinstance(value, str | int | float)}
        for event in events
        if event["event"] in event_names.EVENTS - _QUIET and event.get("level") != "debug"
    ]
    runs = groupby(shown[::-1], _kind)
    entries = chain.from_iterable(_collapsed(kind, list(run)) for kind, run in runs)
    return list(islice(entries, MOST_EVENTS))


def _kind(event: Mapping[str, Any]) -> str:
    """Return what events that follow each other have in common if they are shown as one; empty for others."""
    name: str = event["event"]
    if name in _COMINGS:
        return name
    is_newer = name == event_names.VERSION_PUBLISHED and event.get("reason") == "newer"
    return event_names.VERSION_PUBLISHED if is_newer or name == event_names.STEP_PRUNED else ""


def _collapsed(kind: str, run: list[Document]) -> list[Document]:
    """Return what is shown of events in a row, newest first: of a long row the newest, with the figures of all."""
    same = [event for event in run if event["event"] == kind]
    if len(same) < _LONG_RUN:
        return run
    figures = {"since": run[-1].get("at"), "count": len(same), "removed": len(run) - len(same)}
    if kind == event_names.VERSION_PUBLISHED:
        figures["first"] = f"{same[-1].get('generation')}.{same[-1].get('step')}"
    return [{**same[0], "at": run[0].get("at"), "run": figures}]


def bounded(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Return a value with no list, text or number, and no depth, that a page could not take."""
    if isinstance(value, dict | list) and not levels:
        return "..."
    if isinstance(value, dict):
        fields = list(value.items())[:_MOST_FIELDS]
        return {bounded(key): bounded(item, levels - 1) for key, item in fields}
    if isinstance(value, list):
        return [bounded(item, levels - 1) for item in value[:MOST_ROWS]]
    if isinstance(value, str):
        return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}..."
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
