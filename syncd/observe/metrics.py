"""Prometheus: an observer that turns events into metrics, an endpoint, and a textfile where ports cannot be scraped.

`prometheus_client` is optional, and imported only when a `Metrics` is made. `metric_table.py` has the metrics.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from syncd._version import __version__
from syncd.errors import ConfigError, plain
from syncd.extras import install_command
from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.observe.metric_table import COUNTERS, GAUGES, HISTOGRAMS, OF_EXPLORER, OF_FIELD, UNKNOWN
from syncd.protocol.engine_state import EngineState
from syncd.protocol.mount import MountState

Fields = Mapping[str, Any]

TEXTFILE_EVERY = 5.0  # seconds between two writes of the textfile

_FAILURES = (
    event_names.OPERATION_FAILED,
    event_names.ENTRY_READ_FAILED,
    event_names.ENTRY_MOVE_FAILED,
    event_names.JOB_DISAPPEARED,
    event_names.CONFIG_REJECTED,
    event_names.MIRROR_FAILED,
)


class Metrics:
    """Turns events into metrics of a separate registry.

    Each has the label `directory`, the job directory, so that the files of several jobs on a host do not collide. The
    event `daemon_started` sets it as well.
    """

    def __init__(self, job: str = "") -> None:
        self._client = client = _client()
        self._labels = {"directory": plain(job)}
        bare = client.CollectorRegistry()
        self.registry = client.CollectorRegistry()
        self.registry.register(_Labelled(bare, self._labels))
        self._all = _instruments(client, bare)
        self._show_mount_state(MountState.OK)
        self._filling: dict[int, tuple[int, int | None]] = {}
        self._closers: list[Callable[[], None]] = []
        self._textfile, self._written_at = "", float("-inf")
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
        for field, gauge in OF_FIELD.get(event.name, {}).items():
            if event.fields.get(field) is not None:
                self._all[gauge].set(event.fields[field])
        self._write(at_once=event.name == event_names.DAEMON_STOPPED)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer `GET /metrics` from a thread, and return the port; 0 takes a free one."""
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
        self._textfile = os.path.abspath(path)

    def close(self) -> None:
        """Stop serving, and write the textfile a last time."""
        self._write(at_once=True)
        while self._closers:
            self._closers.pop(0)()

    def _table(self) -> dict[str, Callable[[Fields], None]]:
        followers = (event_names.STANDBY_STARTED, event_names.LEADERSHIP_LOST, event_names.DAEMON_STOPPED)
        return {
            event_names.DAEMON_STARTED: self._on_start,
            event_names.LEADERSHIP_ACQUIRED: lambda _: self._all["is_leader"].set(1),
            **dict.fromkeys(followers, self._on_following),
            **dict.fromkeys((event_names.STEP_FOUND, event_names.STEP_PROGRESSED), self._on_filling),
            event_names.STEP_COMPLETED: self._on_filled,
            event_names.STEP_DAMAGED: self._on_damage,
            event_names.VERSION_PUBLISHED: self._on_published,
            event_names.VERSION_REWOUND: lambda fields: self._counted("versions_rewound", fields, "reason"),
            event_names.STEP_PRUNED: self._on_pruned,
            event_names.EXPLORER_LAG_CHANGED: lambda fields: self._show_explorer(fields, ("lag",)),
            event_names.ENGINE_REPORTED: self._on_engine,
            **dict.fromkeys((event_names.EXPLORER_DIED, event_names.EXPLORER_LEFT), self._on_explorer_gone),
            event_names.SCAN_COMPLETED: self._on_scan,
            **dict.fromkeys(_FAILURES, lambda fields: self._counted("errors", fields, "code", "unknown")),
            event_names.MOUNT_STATE_CHANGED: self._on_mount_state,
            event_names.MIRROR_STEP_COPIED: self._on_mirrored,
            event_names.MIRROR_VERSION_PUBLISHED: lambda _: self._all["mirror_versions"].inc(),
            event_names.MIRROR_BATCH_COPIED: lambda _: self._all["mirror_batches"].inc(),
            event_names.WAVE_ENDED: lambda _: self._forget(event_names.WAVE_CHANGED),
        }

    def _on_start(self, fields: Fields) -> None:
        self._labels["directory"] = plain(fields.get("job") or self._labels["directory"])

    def _on_following(self, _: Fields) -> None:
        self._all["is_leader"].set(0)
        # Only a leader scans: what it saw last is out of date.
        self._filling.clear()
        self._show_progress()
        for gauge in (*OF_EXPLORER.values(), "engine_state"):
            self._all[gauge].clear()
        self._forget(event_names.SCAN_COMPLETED)
        self._forget(event_names.WAVE_CHANGED)

    def _on_filling(self, fields: Fields) -> None:
        if fields.get("state", "filling") == "filling":
            self._filling[fields["step"]] = (fields.get("present") or 0, fields.get("expected"))
            self._show_progress()

    def _on_filled(self, fields: Fields) -> None:
        if self._filling.pop(fields.get("step", -1), None) is not None:
            self._show_progress()

    def _on_damage(self, fields: Fields) -> None:
        self._all["steps_damaged"].inc()
        self._on_filled(fields)

    def _on_published(self, fields: Fields) -> None:
        self._counted("versions_published", fields, "reason")
        self._all["published_bytes"].inc(fields.get("bytes") or 0)
        if fields.get("latency") is not None:
            self._all["publish_latency_seconds"].observe(fields["latency"])
        self._show_changes(fields)

    def _show_changes(self, fields: Fields) -> None:
        """Show the figures of a delta or a shortcut; NaN for a step without changes."""
        whole, changes = fields.get("whole_bytes"), fields.get("changes_bytes")
        ratio = whole / changes if whole and changes else None
        figures = {"density": fields.get("density"), "ratio": ratio, "chain_deltas": fields.get("chain")}
        for name, value in figures.items():
            self._all[f"version_{name}"].set(math.nan if value is None else value)
        if whole is not None and changes is not None:
            kind = "delta" if fields.get("kind") == "delta" else "shortcut"
            self._all["saved_bytes"].labels(kind).inc(max(whole - changes, 0))

    def _on_pruned(self, fields: Fields) -> None:
        self._counted("steps_pruned", fields, "rule")
        self._all["pruned_bytes"].labels(fields.get("rule", "")).inc(fields.get("bytes") or 0)
        self._on_filled(fields)

    def _on_mirrored(self, fields: Fields) -> None:
        self._all["mirror_steps"].inc()
        self._all["mirror_bytes"].inc(fields.get("sent") or 0)

    def _on_engine(self, fields: Fields) -> None:
        self._show_explorer(fields, OF_EXPLORER.keys() - {"lag"})
        for state in EngineState:
            self._all["engine_state"].labels(fields["explorer"], state.value).set(state == fields["state"])

    def _show_explorer(self, fields: Fields, shown: Iterable[str]) -> None:
        """Show fields of an event as gauges of its explorer; one without a value has no gauge."""
        for field in shown:
            gauge = self._all[OF_EXPLORER[field]]
            if (value := fields.get(field)) is None:
                _remove(gauge, fields["explorer"])
            else:
                gauge.labels(fields["explorer"]).set(value)

    def _on_explorer_gone(self, fields: Fields) -> None:
        for gauge in OF_EXPLORER.values():
            _remove(self._all[gauge], fields["explorer"])
        for state in EngineState:
            _remove(self._all["engine_state"], fields["explorer"], state.value)

    def _on_scan(self, fields: Fields) -> None:
        full = "true" if fields.get("full") else "false"
        self._all["scan_duration_seconds"].labels(full).observe(fields["seconds"])
        if (filling := fields.get("filling")) is not None:
            # No event says that the directory of a save has gone: its writer, or a person, removes it.
            self._filling = {step: parts for step, parts in self._filling.items() if step in filling}
            self._show_progress()

    def _forget(self, event: str) -> None:
        """Show no value for the fields of an event."""
        for gauge in OF_FIELD[event].values():
            self._all[gauge].set(math.nan)

    def _counted(self, name: str, fields: Fields, label: str, otherwise: str = "") -> None:
        self._all[name].labels(fields.get(label, otherwise)).inc()

    def _on_mount_state(self, fields: Fields) -> None:
        state = fields.get("state", MountState.OK)
        self._show_mount_state(state)
        if state != MountState.STUCK:
            self._all["mount_stuck_seconds"].set(0)

    def _show_mount_state(self, now: str) -> None:
        for state in MountState:
            self._all["mount_state"].labels(state.value).set(state.value == now)

    def _show_progress(self) -> None:
        newest = max(self._filling, default=-1)
        present, expected = self._filling.get(newest, (0, None))
        self._all["filling_step"].set(newest)
        self._all["shards_present"].set(present)
        self._all["shards_expected"].set(expected or 0)
        self._all["shards_ratio"].set(present / expected if expected else 0)

    def _write(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if not self._textfile or not (at_once or now - self._written_at >= TEXTFILE_EVERY):
            return
        self._written_at = now
        try:
            # The collector reads *.prom only, so it never reads the temporary file that is renamed.
            self._client.write_to_textfile(self._textfile, self.registry)
        except OSError:
            self._all["textfile_errors"].inc()


def _instruments(client: Any, registry: Any) -> dict[str, Any]:
    """Return all metrics of one daemon, registered, by their names without `syncd_`."""
    kinds = ((client.Counter, COUNTERS), (client.Gauge, GAUGES), (client.Gauge, UNKNOWN))
    made = {
        name: kind(f"syncd_{name}", text, labels, registry=registry)
        for kind, table in kinds
        for name, (text, *labels) in table.items()
    }
    for name, (text, buckets, *labels) in HISTOGRAMS.items():
        made[name] = client.Histogram(f"syncd_{name}", text, labels, registry=registry, buckets=buckets)
    for name in UNKNOWN:
        made[name].set(math.nan)
    made["info"].labels(__version__).set(1)
    made["filling_step"].set(-1)
    return made


def _remove(gauge: Any, *labels: str) -> None:
    with contextlib.suppress(KeyError):
        gauge.remove(*labels)


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


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("metrics need prometheus_client", hint=install_command("metrics")) from error
    return prometheus_client
