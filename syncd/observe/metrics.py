"""Prometheus: one more adapter of events, an endpoint, and a textfile where ports cannot be scraped.

`prometheus_client` is an optional extra: it is imported when a `Metrics` is made and not before.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from syncd.errors import ConfigError
from syncd.observe import names
from syncd.observe.events import Event
from syncd.observe.instruments import Instruments, Labelled
from syncd.observe.textfile import Textfile
from syncd.protocol.mount import MountState

Fields = Mapping[str, Any]


class Metrics:
    """Turns events into metrics of a registry of its own.

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
        self.registry.register(Labelled(bare, self._labels))
        self._all = Instruments(client, bare)
        self._filling: dict[int, tuple[int, int | None]] = {}
        self._closers: list[Callable[[], None]] = []
        self._textfile: Textfile | None = None
        self._takers = self._table()

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
        """Take one event, and write the textfile if it is due."""
        taker = self._takers.get(event.name)
        if taker is not None:
            taker(event.fields)
        self._write(at_once=event.name == names.DAEMON_STOPPED)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer `GET /metrics` from a thread, and return the port; 0 takes a free one.

        Raises:
            ConfigError: The address cannot be had.
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
        """Stop answering, and write the textfile a last time."""
        self._write(at_once=True)
        while self._closers:
            self._closers.pop(0)()

    def _table(self) -> dict[str, Callable[[Fields], None]]:
        return {
            names.DAEMON_STARTED: self._starts,
            names.LEADERSHIP_ACQUIRED: self._leads,
            names.STANDBY_STARTED: self._follows,
            names.LEADERSHIP_LOST: self._follows,
            names.DAEMON_STOPPED: self._follows,
            names.STEP_FOUND: self._fills,
            names.STEP_PROGRESSED: self._fills,
            names.STEP_COMPLETED: self._ends_filling,
            names.STEP_DAMAGED: self._finds_damage,
            names.VERSION_PUBLISHED: self._publishes,
            names.VERSION_REWOUND: self._rewinds,
            names.STEP_PRUNED: self._removes,
            names.EXPLORER_LAG_CHANGED: self._lags,
            names.EXPLORER_DIED: self._loses,
            names.EXPLORER_LEFT: self._loses,
            names.SCAN_COMPLETED: self._scans,
            names.OPERATION_FAILED: self._fails,
            names.ENTRY_READ_FAILED: self._fails,
            names.ENTRY_MOVE_FAILED: self._fails,
            names.JOB_DISAPPEARED: self._fails,
            names.CONFIG_REJECTED: self._fails,
            names.MOUNT_STATE_CHANGED: self._changes_state,
            names.MOUNT_STUCK: self._is_stuck,
        }

    def _starts(self, fields: Fields) -> None:
        self._labels["directory"] = fields.get(names.JOB) or self._labels["directory"]

    def _leads(self, fields: Fields) -> None:
        self._all.leading.set(1)
        _set(self._all.term, fields.get(names.TERM))

    def _follows(self, _: Fields) -> None:
        self._all.leading.set(0)
        # Only a leader looks: what it saw last is not news any more.
        self._filling.clear()
        self._show_progress()
        self._all.lag.clear()

    def _fills(self, fields: Fields) -> None:
        if fields.get(names.STATE, "filling") == "filling":
            self._filling[fields[names.STEP]] = (fields.get(names.PRESENT) or 0, fields.get(names.EXPECTED))
            self._show_progress()

    def _ends_filling(self, fields: Fields) -> None:
        if self._filling.pop(fields.get(names.STEP, -1), None) is not None:
            self._show_progress()

    def _finds_damage(self, fields: Fields) -> None:
        self._all.damaged.inc()
        self._ends_filling(fields)

    def _publishes(self, fields: Fields) -> None:
        self._all.published.labels(fields.get(names.REASON, "")).inc()
        self._all.published_bytes.inc(fields.get(names.BYTES) or 0)
        _set(self._all.generation, fields.get(names.GENERATION))
        _set(self._all.step, fields.get(names.STEP))
        if fields.get(names.LATENCY) is not None:
            self._all.latency.observe(fields[names.LATENCY])

    def _rewinds(self, fields: Fields) -> None:
        self._all.rewinds.labels(fields.get(names.REASON, "")).inc()

    def _removes(self, fields: Fields) -> None:
        rule = fields.get(names.RULE, "")
        self._all.removed.labels(rule).inc()
        self._all.removed_bytes.labels(rule).inc(fields.get(names.BYTES) or 0)
        self._ends_filling(fields)

    def _lags(self, fields: Fields) -> None:
        self._all.lag.labels(fields[names.EXPLORER]).set(fields[names.LAG])

    def _loses(self, fields: Fields) -> None:
        with contextlib.suppress(KeyError):
            self._all.lag.remove(fields[names.EXPLORER])

    def _scans(self, fields: Fields) -> None:
        self._all.scan.labels("true" if fields.get(names.FULL) else "false").observe(fields[names.SECONDS])
        _set(self._all.steps, fields.get(names.STEPS))
        _set(self._all.bytes, fields.get(names.BYTES))
        _set(self._all.free, fields.get(names.FREE))
        _set(self._all.leases, fields.get(names.LEASES))
        _set(self._all.explorers, fields.get(names.EXPLORERS))
        _set(self._all.trainers, fields.get(names.TRAINERS))

    def _fails(self, fields: Fields) -> None:
        self._all.errors.labels(fields.get(names.CODE, "unknown")).inc()

    def _changes_state(self, fields: Fields) -> None:
        state = fields.get(names.STATE, MountState.OK)
        self._all.set_mount_state(state)
        if state != MountState.STUCK:
            self._all.mount_stuck.set(0)

    def _is_stuck(self, fields: Fields) -> None:
        _set(self._all.mount_stuck, fields.get(names.SECONDS))

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


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("metrics need prometheus_client", hint="pip install 'syncd[metrics]'") from error
    return prometheus_client


def _set(gauge: Any, value: float | None) -> None:
    if value is not None:
        gauge.set(value)
