"""The jobs that are served: each is polled in a thread of its own, so that one whose mount hangs stops no other."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import quote

from syncd._version import __version__
from syncd.errors import storage_errors
from syncd.parts.page import document
from syncd.parts.page.poller import Document, PollResult, PollState, SharedPoll, poll_all
from syncd.parts.page.routes import PATIENCE
from syncd.parts.page.site import JobSite, PageContent, Query, Route, as_json, static_files
from syncd.protocol.disk import Clock
from syncd.protocol.layout import MARKER, STATE, STEP_PREFIX, TRACKER
from syncd.views.problem_groups import Severity, worst

MOST_JOBS = 64  # jobs that are served at most

OVERVIEW_SCHEMA = 1
OVERVIEW = "overview.html"
SEARCH_EVERY = 30.0  # seconds between two searches for jobs

_MOST_ENTRIES = 2000
_SIGNS = frozenset({STATE, MARKER, TRACKER})
_EACH = 0.125  # seconds of the interval between two requests for the overview that each job adds

_RANKS = {severity: rank for rank, severity in enumerate((*Severity, "unknown", "ok"))}


class ServedJob:
    """One job: its poll, and its page.

    Polls are at least `every` seconds apart. `overview` is relative to the page; None if this is the only job.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[], Document],
        routes: Mapping[str, Route],
        clock: Clock,
        every: float,
        overview: str | None = None,
    ) -> None:
        self.path, self.poll = path, SharedPoll(read, clock, every)
        self._every, self._overview = every, overview
        self.site = JobSite({"/data.json": self._data, **routes})

    def _data(self, _: Query) -> Document:
        return document.answer(self.poll.current(PATIENCE), self._every, self._overview)


class JobsSite:
    """An overview of several jobs at `/`, and the page of each below `/jobs/NAME/`.

    Requests are at least `every` seconds apart. `search` finds the jobs in its directory; None if they are fixed.
    """

    def __init__(
        self,
        jobs: Callable[[], Mapping[str, ServedJob]],
        clock: Clock,
        every: float,
        search: "JobSearch | None" = None,
    ) -> None:
        self._jobs, self._clock, self._every, self._search = jobs, clock, every, search
        self._files = static_files(OVERVIEW)

    def at(self, path: str, query: Query) -> PageContent | None:
        if path == "/jobs.json":
            return as_json(self._overview())
        if not path.startswith("/jobs/"):
            return self._files.get(path)
        name, slash, rest = path.removeprefix("/jobs/").partition("/")
        job = {quoted(name): job for name, job in self._jobs().items()}.get(name)
        return job.site.at(f"/{rest}", query) if job and slash else None

    def _overview(self) -> Document:
        jobs = self._jobs()
        results = poll_all([job.poll for job in jobs.values()], self._clock, PATIENCE)
        rows = [
            summary(name, job.path, poll) for (name, job), poll in zip(jobs.items(), results, strict=True)
        ]
        serving = {
            "syncd": __version__,
            "every": max(self._every, _EACH * len(jobs)),
            "root": self._search and self._search.state(),
            "left_out": self._search.left_out if self._search else 0,
        }
        ordered = sorted(rows, key=lambda row: (_RANKS[row["severity"]], row["name"]))
        shown: Document = document.bounded({"serving": serving, "jobs": ordered})
        return {"schema_version": OVERVIEW_SCHEMA, **shown}


class JobSearch:
    """Finds the jobs below a directory again and again, in a thread of its own."""

    def __init__(self, root: str, open_job: Callable[[str], ServedJob], clock: Clock) -> None:
        self._root, self._open, self._served = root, open_job, dict[str, ServedJob]()
        self._lock = threading.Lock()
        self.poll = SharedPoll(lambda: {"jobs": list(found_jobs(root))}, clock, SEARCH_EVERY)

    @property
    def left_out(self) -> int:
        return max(len(self._job_names()) - MOST_JOBS, 0)

    def jobs(self) -> dict[str, ServedJob]:
        """Return the jobs of the last search by their paths below the directory."""
        with self._lock:
            jobs = self._served
            self._served = {
                name: jobs.get(name) or self._open(f"{self._root}/{name}")
                for name in self._job_names()[:MOST_JOBS]
            }
            return self._served

    def state(self) -> Document:
        poll = self.poll.current(0.0)
        return {"path": self._root, **document.poll_state(poll)}

    def _job_names(self) -> list[str]:
        result = self.poll.current(0.0).document
        return result["jobs"] if result else []


def found_jobs(root: str) -> Iterator[str]:
    """Yield the job directories in a directory and in the directories in it, as paths below it, sorted.

    A job is a directory with a state directory, a marker or a step. What is below a job is none.
    """
    with storage_errors(root):
        for name in _directories(root):
            if is_job(f"{root}/{name}"):
                yield name
            else:
                yield from (f"{name}/{inner}" for inner in _inner(f"{root}/{name}"))


def _inner(directory: str) -> list[str]:
    try:
        return [name for name in _directories(directory) if is_job(f"{directory}/{name}")]
    except OSError:
        return []


def _directories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        listed = [entry for entry in islice(entries, _MOST_ENTRIES) if not entry.name.startswith(".")]
    return sorted(entry.name for entry in listed if _is_directory(entry))


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle, or to where this user may not go
        return False


def is_job(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            names = (entry.name for entry in islice(entries, _MOST_ENTRIES))
            return any(name in _SIGNS or name.startswith(STEP_PREFIX) for name in names)
    except OSError:
        return False


def names_of(paths: Sequence[str]) -> dict[str, str]:
    """Return paths of jobs by name: the last part of a path, or the whole of it if several have that."""
    last = [os.path.basename(path.rstrip("/")) or path for path in paths]
    return {name if last.count(name) == 1 else path: path for name, path in zip(last, paths, strict=True)}


def quoted(name: str) -> str:
    return quote(os.fsencode(name), safe="")


def summary(name: str, path: str, poll: PollResult) -> dict[str, Any]:
    shown = poll.document
    status = shown["status"] if shown else None
    return {
        "name": name,
        "href": f"jobs/{quoted(name)}/",
        "job": path,
        **_urgency(poll, status),
        **document.poll_state(poll),
        **_figures(status),
    }


def _urgency(poll: PollResult, status: Document | None) -> dict[str, str]:
    """Return the severity of a job, and its most urgent problem."""
    if poll.state in (PollState.STUCK, PollState.FAILING):
        stuck = f"a scan has not returned for {poll.looking_for or 0:.0f} s: the mount may not answer"
        said = stuck if poll.state is PollState.STUCK else str(poll.error)
        return {"severity": Severity.CRITICAL.value, "attention": said}
    if status is None:
        return {"severity": "unknown", "attention": ""}
    groups = status["problem_groups"]
    more = f", and {len(groups) - 1} more" if len(groups) > 1 else ""
    return {"severity": worst(groups), "attention": f"{groups[0]['text']}{more}" if groups else ""}


def _figures(status: Document | None) -> dict[str, Any]:
    if status is None:
        empty = dict.fromkeys(("version", "published", "trainer", "finished"))
        return {**empty, "empty": False, "explorers": 0, "dead": 0, "lag": 0}
    version, explorers = status["version"], status["explorers"]
    living = [item for item in explorers if item["alive"] is not False]
    trainers = sorted(status["trainers"], key=lambda item: item["alive"] is False)
    return {
        "version": version and {"generation": version["generation"], "step": version["step"]},
        "published": version and version["age"],
        "trainer": {name: trainers[0][name] for name in ("heart", "status", "step")} if trainers else None,
        "finished": status["finished"],
        "empty": status["next"] is not None,
        "explorers": len(living),
        "dead": sum(item["heart"] == "dead" for item in explorers),
        "lag": max((item["lag"] or 0 for item in living), default=0),
    }
