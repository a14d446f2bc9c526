"""Prometheus: an observer that turns events into metrics, an endpoint, and a textfile where ports cannot be scraped.

`prometheus_client` is an optional extra: it is imported when a `Metrics` is made and not before. docs/metrics.md has
the list.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from syncd._version import __version__
from syncd.errors import ConfigError
from syncd.observe import names
from syncd.observe.events import Event
from syncd.protocol.mount import MountState

Fields = Mapping[str, Any]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SCAN_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

TEXTFILE_EVERY = 5.0
"""Seconds between two writes of the textfile."""

_FAILURES = (
    names.OPERATION_FAILED,
    names.ENTRY_READ_FAILED,
    names.ENTRY_MOVE_FAILED,
    names.JOB_DISAPPEARED,
    names.CONFIG_REJECTED,
)


class Metrics:
    """Turns events into metrics of a separate registry.

    Args:
        job: The job directory: the label `directory` of every metric, so that the files of several jobs on a
            host do not collide. Taken from the event `daemon_started` as well.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, job: str = "") -> None:
        self._client = client = _client()
        self._labels = {"directory": job}
        bare = client.CollectorRegistry()
        self.registry = client.CollectorRegistry()
        self.registry.register(_Labelled(bare, self._labels))
        self._all = Instruments(client, bare)
        self._filling: dict[int, tuple[int, int | None]] = {}
        self._closers: list[Callable[[], None]] = []
        self._textfile: Textfile | None = None
        self._handlers = self._table()

    @staticmethod
    def start(port: int, host: str, textfile: str, job: str = "") -> "Metrics":
        """Return metrics that are served on a port, written to a textfile, or both; 0 and "" for neither."""
        metrics = Metrics(job)
        if port:
            metrics.serve(port, host)
        if textfile:
            metrics.write_to(textfile)
        return metrics

    def observe(self, event: Event) -> None:
        """Count one event, and write the textfile if it is due."""
        handler = self._handlers.get(event.name)
        if handler is not None:
            handler(event.fields)
        self._write(at_once=event.name == names.DAEMON_STOPPED)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer `GET /metrics` from a thread, and return the port; 0 takes a free one.

        Raises:
            ConfigError: The address is not usable.
        """
        try:
            server, _ = self._client.start_http_server(port, host, self.registry)
        except OSError as error:
            hint = f"ss -ltnp 'sport = :{port}'"
            raise ConfigError(
                f"no metrics on {host}:{port} ({error.strerror or error})", hint=hint
            ) from error
        self._closers = [server.shutdown, server.server_close]
        return int(server.server_port)

    def write_to(self, path: str) -> None:
        """Keep a textfile up to date."""
        self._textfile = Textfile(path)

    def close(self) -> None:
        """Stop serving, and write the textfile a last time."""
        self._write(at_once=True)
        while self._closers:
            self._closers.pop(0)()

    def _table(self) -> dict[str, Callable[[Fields], None]]:
        followers = (names.STANDBY_STARTED, names.LEADERSHIP_LOST, names.DAEMON_STOPPED)
        return {
            names.DAEMON_STARTED: self._on_start,
            names.LEADERSHIP_ACQUIRED: self._on_leading,
            **dict.fromkeys(followers, self._on_following),
            **dict.fromkeys((names.STEP_FOUND, names.STEP_PROGRESSED), self._on_filling),
            names.STEP_COMPLETED: self._on_filled,
            names.STEP_DAMAGED: self._on_damage,
            names.VERSION_PUBLISHED: self._on_published,
            names.VERSION_REWOUND: lambda fields: self._all.rewinds.labels(
                fields.get(names.REASON, "")
            ).inc(),
            names.STEP_PRUNED: self._on_pruned,
            names.EXPLORER_LAG_CHANGED: self._on_lag,
            **dict.fromkeys((names.EXPLORER_DIED, names.EXPLORER_LEFT), self._on_explorer_gone),
            names.SCAN_COMPLETED: self._on_scan,
            **dict.fromkeys(_FAILURES, self._on_failure),
            names.MOUNT_STATE_CHANGED: self._on_mount_state,
            names.MOUNT_STUCK: lambda fields: _set(self._all.mount_stuck, fields.get(names.SECONDS)),
        }

    def _on_start(self, fields: Fields) -> None:
        self._labels["directory"] = fields.get(names.JOB) or self._labels["directory"]

    def _on_leading(self, fields: Fields) -> None:
        self._all.leading.set(1)
        _set(self._all.term, fields.get(names.TERM))

    def _on_following(self, _: Fields) -> None:
        self._all.leading.set(0)
        # Only a leader scans: what it saw last is out of date.
        self._filling.clear()
        self._show_progress()
        self._all.lag.clear()

    def _on_filling(self, fields: Fields) -> None:
        if fields.get(names.STATE, "filling") == "filling":
            self._filling[fields[names.STEP]] = (fields.get(names.PRESENT) or 0, fields.get(names.EXPECTED))
            self._show_progress()

    def _on_filled(self, fields: Fields) -> None:
        if self._filling.pop(fields.get(names.STEP, -1), None) is not None:
            self._show_progress()

    def _on_damage(self, fields: Fields) -> None:
        self._all.damaged.inc()
        self._on_filled(fields)

    def _on_published(self, fields: Fields) -> None:
        self._all.published.labels(fields.get(names.REASON, "")).inc()
        self._all.published_bytes.inc(fields.get(names.BYTES) or 0)
        _set(self._all.generation, fields.get(names.GENERATION))
        _set(self._all.step, fields.get(names.STEP))
        if fields.get(names.LATENCY) is not None:
            self._all.latency.observe(fields[names.LATENCY])

    def _on_pruned(self, fields: Fields) -> None:
        rule = fields.get(names.RULE, "")
        self._all.removed.labels(rule).inc()
        self._all.removed_bytes.labels(rule).inc(fields.get(names.BYTES) or 0)
        self._on_filled(fields)

    def _on_lag(self, fields: Fields) -> None:
        self._all.lag.labels(fields[names.EXPLORER]).set(fields[names.LAG])

    def _on_explorer_gone(self, fields: Fields) -> None:
        with contextlib.suppress(KeyError):
            self._all.lag.remove(fields[names.EXPLORER])

    def _on_scan(self, fields: Fields) -> None:
        self._all.scan.labels("true" if fields.get(names.FULL) else "false").observe(fields[names.SECONDS])
        for name, gauge in self._all.totals.items():
            _set(gauge, fields.get(name))

    def _on_failure(self, fields: Fields) -> None:
        self._all.errors.labels(fields.get(names.CODE, "unknown")).inc()

    def _on_mount_state(self, fields: Fields) -> None:
        state = fields.get(names.STATE, MountState.OK)
        self._all.set_mount_state(state)
        if state != MountState.STUCK:
            self._all.mount_stuck.set(0)

    def _show_progress(self) -> None:
        newest = max(self._filling, default=-1)
        present, expected = self._filling.get(newest, (0, None))
        self._all.filling_step.set(newest)
        self._all.present.set(present)
        self._all.expected.set(expected or 0)
        self._all.progress.set(present / expected if expected else 0)

    def _write(self, *, at_once: bool) -> None:
        if self._textfile is None or not (at_once or self._textfile.is_due()):
            return
        try:
            self._textfile.write(self._client.generate_latest(self.registry))
        except OSError:
            self._all.textfile_errors.inc()


class Instruments:
    """All metrics of one daemon.

    Args:
        client: The module prometheus_client.
        registry: Where they are registered.
    """

    def __init__(self, client: Any, registry: Any) -> None:
        self._client, self._registry = client, registry
        self._make_counters()
        self._make_gauges()
        self.latency = self._histogram(
            "publish_latency_seconds",
            "From the marker's replace to the version's; only where one clock dates both.",
            LATENCY_BUCKETS,
        )
        self.scan = self._histogram("scan_duration_seconds", "One scan of the job.", SCAN_BUCKETS, ["full"])
        self._gauge("info", "Constant 1.", ["version"]).labels(__version__).set(1)

    def _make_counters(self) -> None:
        make = self._counter
        self.published = make("versions_published", "Versions published.", ["reason"])
        self.published_bytes = make("published_bytes", "Bytes of the steps that were published.")
        self.rewinds = make("versions_rewound", "Times that explorers were sent back.", ["reason"])
        self.removed = make("steps_pruned", "Steps moved to the trash.", ["rule"])
        self.removed_bytes = make("pruned_bytes", "Bytes of the steps moved to the trash.", ["rule"])
        self.damaged = make("steps_damaged", "Times that a step was found damaged.")
        self.errors = make("errors", "Errors by their stable code.", ["code"])
        self.textfile_errors = make("textfile_errors", "Times that the textfile was not written.")

    def _make_gauges(self) -> None:
        self.leading = self._gauge("is_leader", "1 while this daemon leads the job.")
        self.filling_step = self._gauge("filling_step", "Newest step that is being written, -1 without one.")
        self.present = self._gauge("shards_present", "Writers or shards of that step that exist.")
        self.expected = self._gauge("shards_expected", "Writers or shards of that step, 0 while unknown.")
        self.progress = self._gauge("shards_ratio", "shards_present / shards_expected.")
        self.lag = self._gauge("explorer_lag_steps", "Steps that an explorer is behind.", ["explorer"])
        self.term = self._unknown("term", "Fencing token of this daemon's term.")
        self.generation = self._unknown("version_generation", "Generation of the newest version.")
        self.step = self._unknown("version_step", "Step of the newest version.")
        self.totals = {
            names.STEPS: self._unknown("steps", "Step directories in the job."),
            names.BYTES: self._unknown("job_bytes", "Bytes of all steps."),
            names.FREE: self._unknown("free_bytes", "Bytes free on the job's file system."),
            names.LEASES: self._unknown("leases", "Leases that live explorers hold."),
            names.EXPLORERS: self._unknown("explorers_alive", "Live explorers."),
            names.TRAINERS: self._unknown("trainers_alive", "Live trainers."),
        }
        self.mount_state = self._gauge(
            "mount_state", "1 for the state that the job's file system is in.", ["state"]
        )
        self.mount_stuck = self._gauge(
            "mount_stuck_seconds", "Seconds that an operation on it has not returned, 0 without one."
        )
        self.set_mount_state(MountState.OK)
        self.filling_step.set(-1)

    def set_mount_state(self, now: str) -> None:
        """Show one state, and no other."""
        for state in MountState:
            self.mount_state.labels(state.value).set(state.value == now)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Any:
        return self._client.Counter(f"syncd_{name}", text, labels or [], registry=self._registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Any:
        return self._client.Gauge(f"syncd_{name}", text, labels or [], registry=self._registry)

    def _unknown(self, name: str, text: str) -> Any:
        """Return a gauge without a value yet: a 0 would raise alerts that nobody can explain."""
        gauge = self._gauge(name, text)
        gauge.set(math.nan)
        return gauge

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Any:
        make = self._client.Histogram
        return make(f"syncd_{name}", text, labels or [], registry=self._registry, buckets=buckets)


class _Labelled:
    """All metrics of a registry, each with some more labels."""

    def __init__(self, registry: Any, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Any]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")  # the time at which a counter was made is of no use
            ]
            yield metric


class Textfile:
    """A `.prom` file for the node exporter's textfile collector, replaced whole and not too often.

    Args:
        path: Where it is; its directory must exist.
        every: Seconds between two writes.
    """

    def __init__(self, path: str, every: float = TEXTFILE_EVERY) -> None:
        self._path, self._every = os.path.abspath(path), every
        self._written_at = float("-inf")

    def is_due(self) -> bool:
        """Return whether the last attempt to write was long enough ago."""
        return time.monotonic() - self._written_at >= self._every

    def write(self, data: bytes) -> None:
        """Replace the file.

        Raises:
            OSError: It cannot be written; the old one stays.
        """
        self._written_at = time.monotonic()
        # The collector reads *.prom only, so it never reads this file half written.
        temporary = f"{self._path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("metrics need prometheus_client", hint="pip install 'syncd[metrics]'") from error
    return prometheus_client


def _set(gauge: Any, value: float | None) -> None:
    if value is not None:
        gauge.set(value)
