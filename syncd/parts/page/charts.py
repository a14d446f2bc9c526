"""The charts of the page: what the trainer's metrics.jsonl and the daemon's journal say, over time.

docs/json.md documents the answer. Reading continues where the last reading ended, a bounded number of bytes at a
time; a series takes a bounded number of points (`series`).
"""

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from syncd.errors import JobMissingError, storage_errors
from syncd.figures import METRICS, MOST_LINES, Curve, Panel, by_present_names
from syncd.observe import event_names
from syncd.observe.journal import KEEP
from syncd.parts.page.chart_table import CHARTS, EVENTS
from syncd.parts.page.document import serving
from syncd.parts.page.lanes import REPORTED_WITHIN, LaneCollector
from syncd.parts.page.poller import PollResult
from syncd.parts.page.series import Point, ThinnedSeries
from syncd.parts.page.tail import GrowingFiles
from syncd.protocol.disk import is_directory
from syncd.protocol.engine_state import EngineState
from syncd.protocol.layout import Job

SCHEMA = 1  # the `schema_version` of `/charts.json` and `/lanes.json`
EVERY = 5.0  # seconds between two readings at least
MOST_READ = 16 << 20  # bytes that one reading takes, of all files together: a second's work
MOST_NAMES = 4096  # explorers, and metrics, that are told apart; a file may name any number
MOST_LETTERS = 200  # letters in the name of a metric that may be one of a family

_TROUBLE = frozenset(state.value for state in EngineState if state.is_trouble)


_FAMILIES = tuple(chart for chart in CHARTS if chart.family is not None)


def _sources(file: str) -> dict[tuple[str, ...], ThinnedSeries]:
    return {
        curve.names: ThinnedSeries() for chart in CHARTS if chart.source == file for curve in chart.curves
    }


class MetricsCollector:
    """Series of the trainer's metrics, by the rule of docs/observe.md: a line of step s voids all later steps."""

    def __init__(self) -> None:
        self.series = _sources(METRICS)
        self.families: dict[str, dict[str, str]] = {chart.name: {} for chart in _FAMILIES}
        """By chart: metrics of its family, in the order in which they came, and what their lines are called."""
        self._newest = -1
        self._names: set[str] = set()

    def add(self, document: Mapping[str, Any]) -> None:
        """Take a line; one without step, time and metrics is skipped."""
        step, at, metrics = document.get("step"), _seconds(document.get("time")), document.get("metrics")
        if type(step) is not int or at is None or not isinstance(metrics, dict):
            return
        metrics = by_present_names(metrics)
        self._find_families(metrics)
        for names_of, series in self.series.items():
            name = next((name for name in names_of if name in metrics), None)
            if step <= self._newest:
                series.drop_from(step if name is not None else step + 1)
            if name is not None and isinstance(metrics[name], int | float | None):
                series.add(Point(at, step, _finite(metrics[name])))
        self._newest = step

    def _find_families(self, metrics: Mapping[str, Any]) -> None:
        for name in [name for name in metrics if name not in self._names and len(name) <= MOST_LETTERS]:
            if len(self._names) >= MOST_NAMES:
                return
            self._names.add(name)
            for chart in _FAMILIES:
                if chart.family is not None and (match := chart.family.fullmatch(name)):
                    self._begin(chart.name, name, match[1])

    def _begin(self, chart: str, name: str, label: str) -> None:
        family = self.families[chart]
        family[name] = label
        if len(family) <= MOST_LINES:
            self.series[name,] = ThinnedSeries()


class EventsCollector:
    """Series, and lanes, of what the daemon's journal says of versions and explorers."""

    def __init__(self) -> None:
        self.series = _sources(EVENTS)
        self.newest = 0.0
        self.lanes = LaneCollector()
        self._saved = 0.0
        self._trouble: dict[str, bool] = {}
        self._unconfirmed: set[str] = set()
        self._led_at = 0.0

    def add(self, document: Mapping[str, Any]) -> None:
        """Take an event; one without a name and a date is skipped."""
        event, at = document.get("event"), _finite(document.get("at"))
        if not isinstance(event, str) or at is None:
            return
        self.newest = max(self.newest, at)
        self.lanes.add(event, at, document)
        if event == event_names.VERSION_PUBLISHED:
            self._version(at, document)
        elif event == event_names.LEADERSHIP_ACQUIRED:
            # The new leader reports every explorer that is there; others left while nobody led.
            self._unconfirmed, self._led_at = set(self._trouble), at
        elif event in _OF_EXPLORERS and isinstance(explorer := document.get("explorer"), str):
            self._explorer(at, event, explorer, document.get("state"))

    def _version(self, at: float, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        step = step if type(step) is int else None
        if (latency := _finite(event.get("latency"))) is not None:
            self.series["latency",].add(Point(at, step, latency))
        changes, whole = _finite(event.get("changes_bytes")), _finite(event.get("whole_bytes"))
        if changes is not None and whole is not None:
            self._saved += whole - changes
            self.series["saved",].add(Point(at, step, self._saved))

    def _explorer(self, at: float, event: str, explorer: str, state: object) -> None:
        self._unconfirmed.discard(explorer)
        if at > self._led_at + REPORTED_WITHIN:
            self._trouble = {
                name: is_so for name, is_so in self._trouble.items() if name not in self._unconfirmed
            }
        if event in (event_names.EXPLORER_LEFT, event_names.EXPLORER_DIED):
            self._trouble.pop(explorer, None)
        elif explorer in self._trouble or len(self._trouble) < MOST_NAMES:
            self._trouble[explorer] = event == event_names.ENGINE_STATE_CHANGED and state in _TROUBLE
        self.series["explorers",].add(Point(at, None, float(len(self._trouble))))
        self.series["trouble",].add(Point(at, None, float(sum(self._trouble.values()))))


_OF_EXPLORERS = frozenset(
    {
        event_names.EXPLORER_JOINED,
        event_names.EXPLORER_LEFT,
        event_names.EXPLORER_DIED,
        event_names.ENGINE_STATE_CHANGED,
    }
)


def answer(poll: PollResult, every: float) -> dict[str, Any]:
    """Return the answer of `/charts.json`; the page asks again after `every` seconds."""
    document = poll.document or {"charts": [], "files": []}
    shown = {"charts": document["charts"], "files": document["files"]}
    return {"schema_version": SCHEMA, "serving": serving(poll, every), **shown}


def lanes_answer(poll: PollResult, every: float) -> dict[str, Any]:
    """Return the answer of `/lanes.json`; the page asks again after `every` seconds."""
    lanes = poll.document["lanes"] if poll.document else LaneCollector().document()
    return {"schema_version": SCHEMA, "serving": serving(poll, every), **lanes}


class ChartReader:
    """Reads what is new in the files of a job, `most_read` bytes at a time, and returns the charts."""

    def __init__(self, open_job: Callable[[], Job], most_read: int = MOST_READ) -> None:
        self._open, self._most_read = open_job, most_read
        self._job: Job | None = None

    def __call__(self) -> dict[str, Any]:
        if self._job is None:
            self._job = self._open()
            rotated = [f"{self._job.events}.{number}" for number in range(1, KEEP + 1)]
            self._metrics = GrowingFiles([f"{self._job.root}/{METRICS}"], MetricsCollector)
            self._events = GrowingFiles([self._job.events, *rotated], EventsCollector)
        with storage_errors(self._job.root):
            if not is_directory(self._job.disk, self._job.root):
                raise JobMissingError("the job directory does not exist", path=self._job.root)
            read = self._events.read(self._most_read)
            self._metrics.read(self._most_read - read)
        series = {METRICS: self._metrics.collected.series, EVENTS: self._events.collected.series}
        until = self._events.collected.newest
        return {
            "charts": [
                _document(
                    chart, self._metrics.collected.families.get(chart.name), series[chart.source], until
                )
                for chart in CHARTS
            ],
            "files": [_progress(files) for files in (self._metrics, self._events)],
            "lanes": self._events.collected.lanes.document(),
        }


def _document(
    chart: Panel,
    family: Mapping[str, str] | None,
    series: Mapping[tuple[str, ...], ThinnedSeries],
    until: float,
) -> dict[str, Any]:
    members = [Curve(label, (name,)) for name, label in (family or {}).items()]
    curves = chart.curves or members[:MOST_LINES]
    return {
        "name": chart.name,
        "title": chart.title,
        "unit": chart.unit,
        "source": chart.source,
        "missing": chart.missing,
        "from_zero": chart.from_zero,
        "left_out": max(len(members) - MOST_LINES, 0),
        "series": [_curve(curve, series[curve.names], until) for curve in curves],
    }


def _curve(curve: Curve, series: ThinnedSeries, until: float) -> dict[str, Any]:
    points = series.points()
    if curve.style == "step" and points and points[-1].at < until:
        points.append(points[-1]._replace(at=until))  # it held until the newest event of any kind
    shown = [[round(at, 3), step, value] for at, step, value in points]
    return {"label": curve.label, "style": curve.style, "per_group": series.per_group, "points": shown}


def _progress(files: GrowingFiles[Any]) -> dict[str, Any]:
    return {"name": files.name, "bytes": files.size, "read": files.done, "ignored": files.ignored}


def _seconds(time: object) -> float | None:
    """Return seconds since the epoch of a date as metrics.jsonl has it, None if it is none."""
    try:
        return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _finite(value: object) -> float | None:
    """Return a number that the page can draw, None for anything else."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
