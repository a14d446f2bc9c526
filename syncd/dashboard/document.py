"""The data of the page: the documents of `status --json` and `ls --json`, cut to what a page can show.

docs/dashboard.md documents every field. A job directory may hold anything: lists, texts and numbers are bounded here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from syncd._version import __version__
from syncd.config import DaemonConfig
from syncd.daemon.retention import Decision, decide
from syncd.dashboard.poller import PollResult
from syncd.errors import ConfigError, StorageError
from syncd.observe import names
from syncd.observe.journal import read_events
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.views import data
from syncd.views.data import listing
from syncd.views.job_view import JobView, JobViewer

Document = dict[str, Any]

MOST_ROWS = 200
"""Entries of a list at most."""

MOST_EVENTS = 30
MOST_TEXT = 500
_MOST_READ = 200
"""Newest events of the journal, from which those to show are taken."""

_MOST_FIELDS = 100
_WORST = {"dead": 0, "unknown": 1, "alive": 2, "left": 3}
_QUIET = frozenset(
    {
        names.SCAN_COMPLETED,
        names.EXPLORER_LAG_CHANGED,
        names.ENGINE_REPORTED,
        names.VERSIONS_APPLIED,
        names.STEP_PROGRESSED,
        names.STEP_FOUND,
        names.STEP_COMPLETED,
        names.TRASH_EMPTIED,
    }
)


class PageReader:
    """Reads a job for the page. Opening the job is part of it, because its mount may not answer.

    Args:
        open_job: Returns the job, or raises why it cannot.
        rules: Returns the policy by which its daemon prunes.
        clock: This host's clock.
    """

    def __init__(
        self, open_job: Callable[[], Job], rules: Callable[[Job], DaemonConfig], clock: Clock
    ) -> None:
        self._open, self._rules, self._clock = open_job, rules, clock
        self._job: Job | None = None
        self._policy: DaemonConfig | None = None
        self._policy_problem = ""

    def __call__(self) -> dict[str, Any]:
        """Read the job once, and return the data of the page.

        Raises:
            SyncdError: The job is not there, cannot be read, or at the first view its configuration is wrong.
        """
        if self._job is None:
            self._job = self._open()
            self._looker = JobViewer(self._job, self._clock)
        view, policy = self._looker.read(), self._read_policy(self._job)
        if self._policy_problem:
            view = replace(view, problems={**view.problems, "config": self._policy_problem})
        return found(view, decide(view.scanned, policy), policy, read_events(self._job.events, _MOST_READ))

    def _read_policy(self, job: Job) -> DaemonConfig:
        """Return the policy; if it has become unreadable, show that as a problem and keep the last one."""
        try:
            self._policy, self._policy_problem = self._rules(job), ""
        except (ConfigError, StorageError) as error:
            if self._policy is None:
                raise
            self._policy_problem = str(error)
        return self._policy


def found(
    view: JobView, decisions: Sequence[Decision], policy: DaemonConfig, events: Iterable[Mapping[str, Any]]
) -> Document:
    """Return the data of one view of the job.

    Args:
        view: The view of the job.
        decisions: What retention decides for each step.
        policy: The policy by which it decides.
        events: The newest events of the daemon's journal, oldest first.
    """
    status, steps = data.status(view), listing(view, decisions, policy)
    lists = {
        "steps": steps["steps"],
        **{name: status[name] for name in ("explorers", "trainers", "problems")},
    }
    shown: Document = bounded(
        {
            "status": {**status, "explorers": _worst(status["explorers"])},
            "ls": {**steps, "steps": steps["steps"][::-1]},
            "rules": _rules(steps["steps"]),
            "events": _decisive(events),
            "left_out": {name: max(len(rows) - MOST_ROWS, 0) for name, rows in lists.items()},
        }
    )
    return shown


def answer(known: PollResult, every: float) -> Document:
    """Return the document that the page gets now.

    Args:
        known: The result of the latest poll.
        every: Seconds after which the page should ask again.
    """
    nothing: Document = {"status": None, "ls": None, "rules": [], "events": [], "left_out": {}}
    return {
        "schema_version": data.STATUS_SCHEMA,
        "serving": serving(known, every),
        **(known.document or nothing),
    }


def serving(known: PollResult, every: float) -> Document:
    """Return what each answer says of this server and of its latest poll; arguments as of `answer`."""
    error = known.error
    found = {
        "syncd": __version__,
        "every": every,
        "state": known.state.value,
        "at": known.at,
        "age": _rounded(known.age),
        "looking_for": _rounded(known.looking_for),
        "error": error and {"code": error.code, "message": str(error), "hint": error.hint},
    }
    shown: Document = bounded(found)
    return shown


def _worst(explorers: Sequence[Document]) -> list[Document]:
    """Return the explorers to show, dead ones first, in an order that does not change while they work."""
    trouble_first = sorted(explorers, key=_attention)
    return sorted(trouble_first[:MOST_ROWS], key=lambda one: (_WORST[one["heart"]] != 0, one["id"]))


def _attention(explorer: Document) -> tuple[int, bool, int, str]:
    heart = _WORST[explorer["heart"]]
    return heart, not data.has_engine_trouble(explorer), -(explorer["lag"] or 0), explorer["id"]


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
    """Return the newest events that report a decision, newest first, with their documented fields."""
    shown = [
        {key: value for key, value in event.items() if isinstance(value, str | int | float)}
        for event in events
        if event["event"] in names.EVENTS - _QUIET and event.get("level") != "debug"
    ]
    return shown[: -MOST_EVENTS - 1 : -1]


def bounded(value: Any) -> Any:
    """Return a value with no list, text or number that a page could not take."""
    if isinstance(value, dict):
        return {bounded(key): bounded(item) for key, item in list(value.items())[:_MOST_FIELDS]}
    if isinstance(value, list):
        return [bounded(item) for item in value[:MOST_ROWS]]
    if isinstance(value, str):
        return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}..."
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
