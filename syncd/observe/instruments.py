"""The Prometheus metrics that there are. docs/metrics.md lists them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from syncd._version import __version__
from syncd.protocol.mount import MountState

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SCAN_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


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
        self._make_histograms()
        self._gauge("info", "Constant 1.", ["version"]).labels(__version__).set(1)

    def _make_counters(self) -> None:
        self.published = self._counter("versions_published", "Versions published.", ["reason"])
        self.published_bytes = self._counter("published_bytes", "Bytes of the steps that were published.")
        self.rewinds = self._counter("versions_rewound", "Times that explorers were sent back.", ["reason"])
        self.removed = self._counter("steps_pruned", "Steps moved to the trash.", ["rule"])
        self.removed_bytes = self._counter("pruned_bytes", "Bytes of the steps moved to the trash.", ["rule"])
        self.damaged = self._counter("steps_damaged", "Times that a step was found damaged.")
        self.errors = self._counter("errors", "Errors by their stable code.", ["code"])
        self.textfile_errors = self._counter("textfile_errors", "Times that the textfile was not written.")

    def _make_gauges(self) -> None:
        self.leading = self._gauge("is_leader", "1 while this daemon leads the job.")
        self.filling_step = self._gauge("filling_step", "Newest step that is being written, -1 without one.")
        self.present = self._gauge("shards_present", "Writers or shards of that step that are there.")
        self.expected = self._gauge("shards_expected", "Writers or shards of that step, 0 while unknown.")
        self.progress = self._gauge("shards_ratio", "shards_present / shards_expected.")
        self.lag = self._gauge("explorer_lag_steps", "Steps that an explorer is behind.", ["explorer"])
        self.term = self._unknown("term", "Fencing token of this daemon's term.")
        self.generation = self._unknown("version_generation", "Generation of the newest version.")
        self.step = self._unknown("version_step", "Step of the newest version.")
        self.steps = self._unknown("steps", "Step directories in the job.")
        self.bytes = self._unknown("job_bytes", "Bytes of all steps.")
        self.free = self._unknown("free_bytes", "Bytes free on the job's file system.")
        self.leases = self._unknown("leases", "Leases that live explorers hold.")
        self.explorers = self._unknown("explorers_alive", "Live explorers.")
        self.trainers = self._unknown("trainers_alive", "Live trainers.")
        self.mount_state = self._gauge(
            "mount_state", "1 for the state that the job's file system is in.", ["state"]
        )
        self.mount_stuck = self._gauge(
            "mount_stuck_seconds", "Seconds that an operation on it has not come back, 0 without one."
        )
        self.set_mount_state(MountState.OK)
        self.filling_step.set(-1)

    def set_mount_state(self, now: str) -> None:
        """Show one state, and no other."""
        for state in MountState:
            self.mount_state.labels(state.value).set(state.value == now)

    def _make_histograms(self) -> None:
        make = self._client.Histogram
        self.latency = make(
            "syncd_publish_latency_seconds",
            "From the marker's replace to the version's; only where one clock dates both.",
            registry=self._registry,
            buckets=LATENCY_BUCKETS,
        )
        self.scan = make(
            "syncd_scan_duration_seconds",
            "One look at the job.",
            ["full"],
            registry=self._registry,
            buckets=SCAN_BUCKETS,
        )

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Any:
        return self._client.Counter(f"syncd_{name}", text, labels or [], registry=self._registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Any:
        return self._client.Gauge(f"syncd_{name}", text, labels or [], registry=self._registry)

    def _unknown(self, name: str, text: str) -> Any:
        """Return a gauge without a value yet: a 0 would raise alarms that nobody can explain."""
        gauge = self._gauge(name, text)
        gauge.set(math.nan)
        return gauge


class Labelled:
    """All metrics of a registry, each with some labels more."""

    def __init__(self, registry: Any, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Any]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")  # nobody asks when a counter was made
            ]
            yield metric
