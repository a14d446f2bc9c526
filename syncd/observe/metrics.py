"""Prometheus: an observer that turns events into metrics, an endpoint, and a textfile where ports cannot be scraped.

`prometheus_client` is an optional extra: it is imported when a `Metrics` is made and not before. The tables below
are also those of docs/metrics.md.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from syncd._version import __version__
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.protocol.engine_state import EngineState
from syncd.protocol.mount import MountState

Fields = Mapping[str, Any]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SCAN_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

TEXTFILE_EVERY = 5.0  # seconds between two writes of the textfile

_COUNTERS = {
    "versions_published": (
        "Versions published, by reason: first, newer, rewind, rewritten, rollback, behind.",
        "reason",
    ),
    "published_bytes": ("Bytes of the steps that were published.",),
    "saved_bytes": (
        "Bytes that changes saved: a delta's were neither written nor read, a shortcut's not read.",
        "kind",
    ),
    "versions_rewound": (
        "Times that explorers rolled back, by reason: rewind, rewritten, rollback.",
        "reason",
    ),
    "steps_pruned": ("Steps moved to the trash, by the retention rule that decided.", "rule"),
    "pruned_bytes": ("Bytes of the steps moved to the trash, by rule.", "rule"),
    "steps_damaged": ("Times that a step was found damaged.",),
    "mirror_bytes": ("Bytes that a mirror copied to its target.",),
    "mirror_steps": ("Steps that a mirror sealed at its target.",),
    "mirror_versions": ("Versions that a mirror published at its target.",),
    "mirror_batches": ("Batches of experiences that a mirror passed on towards the trainer.",),
    "errors": ("Errors, by their stable code.", "code"),
    "textfile_errors": ("Times that the textfile could not be written.",),
}
_GAUGES = {
    "is_leader": ("1 while this daemon leads the job; 0 of a stand-by.",),
    "filling_step": ("Newest step that is being written; -1 without one.",),
    "shards_present": ("Writers or shards of that step that exist.",),
    "shards_expected": ("Writers or shards of that step in all; 0 while unknown.",),
    "shards_ratio": ("shards_present / shards_expected.",),
    "explorer_lag_steps": ("Steps that an explorer is behind; removed with the explorer.", "explorer"),
    "engine_state": (
        "1 for the state that an explorer's engine is in, 0 for the others.",
        "explorer",
        "state",
    ),
    "engine_ready": ("1 while an explorer's engine may get work.", "explorer"),
    "engine_load_failures": ("Loads that failed or were refused since the explorer's start.", "explorer"),
    "engine_load_seconds": ("Seconds of the engine's last load.", "explorer"),
    "engine_proof_difference": ("Mean difference of the engine's last proof, in nats.", "explorer"),
    "engine_proof_tolerance": ("Mean difference up to which a version is proven, in nats.", "explorer"),
    "explorer_origin_bytes": (
        "Bytes that an explorer with peers has read from the job's file system since its start.",
        "explorer",
    ),
    "explorer_peer_bytes": ("Bytes that it has read from other hosts since then.", "explorer"),
    "explorer_over_budget": (
        "1 if it read more of the last version from the file system than a quarter beyond its share.",
        "explorer",
    ),
    "mount_state": ("1 for the state that the job's file system is in, 0 for the others.", "state"),
    "mount_stuck_seconds": ("Seconds that an operation on the file system has not returned; 0 without one.",),
    "info": ("Constant 1.", "version"),
}
# Without a value until an event gives one: a 0 would raise alerts that nobody can explain.
_UNKNOWN = {
    "term": ("Fencing token of this daemon's term.",),
    "version_generation": ("Generation of the newest version that this daemon published.",),
    "version_step": ("Step of that version.",),
    "version_density": (
        "Share of words that the version's changes change; NaN without a delta or shortcut.",
    ),
    "version_ratio": ("Bytes of the version stored whole / bytes of its changes; NaN without them.",),
    "version_chain_deltas": (
        "Deltas from the version's keyframe to it; 0 of a shortcut, NaN without changes.",
    ),
    "mirror_behind_steps": ("Steps that a mirror's target is behind its source.",),
    "mirror_left_bytes": (
        "Bytes that a mirror must copy before it can publish its source's newest version.",
    ),
    "steps": ("Step directories in the job.",),
    "quarantined_steps": ("Steps in quarantine.",),
    "job_bytes": ("Bytes of all steps.",),
    "free_bytes": ("Bytes free on the job's file system.",),
    "leases": ("Leases that live explorers hold.",),
    "explorers_alive": ("Live explorers.",),
    "rolling_admitted": ("Explorers that may load a version now; NaN without rolling updates.",),
    "rolling_paused": ("Of them those that gave up serving another version for it.",),
    "rolling_waiting": ("Explorers that wait for their turn.",),
    "rolling_stopped": ("1 while canaries have stopped the published version, else 0.",),
    "rolling_seconds_to_last": ("Seconds from the last publish that reached every engine until it had.",),
    "trainers_alive": ("Live trainers.",),
}
_HISTOGRAMS = {
    "publish_latency_seconds": (
        "From the replacement of the marker to that of the version; only where one clock dates both.",
        LATENCY_BUCKETS,
    ),
    "scan_duration_seconds": (
        "One scan of the job; full is true if everything was examined.",
        SCAN_BUCKETS,
        "full",
    ),
}
_OF_WAVE = {
    "admitted": "rolling_admitted",
    "slots": "rolling_paused",
    "waiting": "rolling_waiting",
    "stopped": "rolling_stopped",
    "seconds": "rolling_seconds_to_last",
}
_OF_FIELD = {
    event_names.LEADERSHIP_ACQUIRED: {"term": "term"},
    event_names.VERSION_PUBLISHED: {"generation": "version_generation", "step": "version_step"},
    event_names.MIRROR_LAG_CHANGED: {"behind": "mirror_behind_steps", "bytes": "mirror_left_bytes"},
    event_names.MOUNT_STUCK: {"seconds": "mount_stuck_seconds"},
    event_names.WAVE_CHANGED: _OF_WAVE,
    event_names.WAVE_PROGRESSED: _OF_WAVE,
    event_names.SCAN_COMPLETED: {
        "steps": "steps",
        "quarantined": "quarantined_steps",
        "bytes": "job_bytes",
        "free": "free_bytes",
        "leases": "leases",
        "explorers": "explorers_alive",
        "trainers": "trainers_alive",
    },
}
"""By event: the gauge that shows each of its fields."""

_OF_EXPLORER = {
    "lag": "explorer_lag_steps",
    "ready": "engine_ready",
    "failures": "engine_load_failures",
    "load_seconds": "engine_load_seconds",
    "mean": "engine_proof_difference",
    "tolerance": "engine_proof_tolerance",
    "origin_bytes": "explorer_origin_bytes",
    "peer_bytes": "explorer_peer_bytes",
    "over_budget": "explorer_over_budget",
}
"""The gauges with the label `explorer`, by the field of an event."""

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

    Args:
        job: The job directory: the label `directory` of every metric, so that the files of several jobs on a
            host do not collide. Taken from the event `daemon_started` as well.
    """

    def __init__(self, job: str = "") -> None:
        self._client = client = _client()
        self._labels = {"directory": job}
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
        for field, gauge in _OF_FIELD.get(event.name, {}).items():
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
        }

    def _on_start(self, fields: Fields) -> None:
        self._labels["directory"] = fields.get("job") or self._labels["directory"]

    def _on_following(self, _: Fields) -> None:
        self._all["is_leader"].set(0)
        # Only a leader scans: what it saw last is out of date.
        self._filling.clear()
        self._show_progress()
        for gauge in (*_OF_EXPLORER.values(), "engine_state"):
            self._all[gauge].clear()

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
        self._show_explorer(fields, _OF_EXPLORER.keys() - {"lag"})
        for state in EngineState:
            self._all["engine_state"].labels(fields["explorer"], state.value).set(state == fields["state"])

    def _show_explorer(self, fields: Fields, shown: Iterable[str]) -> None:
        """Show fields of an event as gauges of its explorer; one without a value has no gauge."""
        for field in shown:
            gauge = self._all[_OF_EXPLORER[field]]
            if (value := fields.get(field)) is None:
                _remove(gauge, fields["explorer"])
            else:
                gauge.labels(fields["explorer"]).set(value)

    def _on_explorer_gone(self, fields: Fields) -> None:
        for gauge in _OF_EXPLORER.values():
            _remove(self._all[gauge], fields["explorer"])
        for state in EngineState:
            _remove(self._all["engine_state"], fields["explorer"], state.value)

    def _on_scan(self, fields: Fields) -> None:
        full = "true" if fields.get("full") else "false"
        self._all["scan_duration_seconds"].labels(full).observe(fields["seconds"])

    def _counted(self, name: str, fields: Fields, label: str, otherwise: str = "") -> None:
        self._all[name].labels(fields.get(label, otherwise)).inc()

    def _on_mount_state(self, fields: Fields) -> None:
        state = fields.get("state", MountState.OK)
        self._show_mount_state(state)
        if state != MountState.STUCK:
            self._all["mount_stuck_seconds"].set(0)

    def _show_mount_state(self, now: str) -> None:
        """Show one state, and no other."""
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


def described() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield each metric for the documentation: name, kind, labels, meaning."""
    tables = (("counter", _COUNTERS), ("gauge", _GAUGES), ("gauge", _UNKNOWN))
    for kind, table in tables:
        for name, (text, *labels) in table.items():
            yield f"syncd_{name}{'_total' if kind == 'counter' else ''}", kind, tuple(labels), text
    for name, (about, _, *named) in _HISTOGRAMS.items():
        yield f"syncd_{name}", "histogram", tuple(map(str, named)), str(about)


def _instruments(client: Any, registry: Any) -> dict[str, Any]:
    """Return all metrics of one daemon, registered, by their names without `syncd_`."""
    kinds = ((client.Counter, _COUNTERS), (client.Gauge, _GAUGES), (client.Gauge, _UNKNOWN))
    made = {
        name: kind(f"syncd_{name}", text, labels, registry=registry)
        for kind, table in kinds
        for name, (text, *labels) in table.items()
    }
    for name, (text, buckets, *labels) in _HISTOGRAMS.items():
        made[name] = client.Histogram(f"syncd_{name}", text, labels, registry=registry, buckets=buckets)
    for name in _UNKNOWN:
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
