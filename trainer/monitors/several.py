"""All monitors of a run as one, which cannot stop training: it never raises and never waits for them.

metrics.jsonl is always written; [monitor] kinds names further kinds. Only rank 0 opens them. Each monitor runs in a
daemon thread: it may raise, be slow or hang, and neither training nor the end of the process waits for it.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import structlog

from syncd.errors import ConfigError, FencedError
from syncd.jobfile.model import JobFile
from trainer.monitors.base import Monitor, MonitoredRun, RolloutSample
from trainer.monitors.jsonl import Jsonl
from trainer.plugins import MONITORS, unknown_name

FAILURES = "monitor/failures"  # calls that monitors failed at since the start
DROPPED = "monitor/dropped"  # calls that monitors did not keep up with since the start
_FILES = "jsonl"
START = 10.0  # seconds that the start waits for monitors to check their options


class Monitors:
    def __init__(self, behind: Sequence["MonitorThread"]) -> None:
        self._behind = tuple(behind)

    @classmethod
    def open(cls, config: JobFile, resumed_from: int, check: Callable[[], None] = lambda: None) -> "Monitors":
        """Start the monitors of a job; they report nothing once `check` raises FencedError."""
        installed = MONITORS.installed
        for kind in config.monitor.options:  # those for kinds that are not configured are allowed
            if kind not in installed:
                raise unknown_name(f"monitor.options.{kind}: no monitor is called {kind!r}", kind, installed)
        kinds = {kind: MONITORS.get(kind) for kind in config.monitor.kinds}
        makes: dict[str, Callable[[MonitoredRun], Monitor]] = {_FILES: Jsonl, **kinds}
        runs = {kind: _run(config, kind, resumed_from) for kind in makes}
        behind = [
            MonitorThread(kind, partial(make, runs[kind]), check, gives_up=kind != _FILES)
            for kind, make in makes.items()
        ]
        deadline = time.monotonic() + START
        try:
            for each in behind:
                each.ready(max(deadline - time.monotonic(), 0.0))
        except ConfigError:
            for each in behind:
                each.end()
            raise
        return cls(behind)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step to all monitors, with the counts of their failed and dropped calls."""
        figures = _plain(metrics) | self.metrics()
        for each in self._behind:
            each.put(lambda monitor: monitor.log(figures, step))

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        if rollouts:
            for each in self._behind:
                each.put(lambda monitor: monitor.log_rollouts(tuple(rollouts), step))

    def metrics(self) -> dict[str, float]:
        failures = sum(each.failures for each in self._behind)
        return {FAILURES: float(failures), DROPPED: float(sum(each.dropped for each in self._behind))}

    def close(self, timeout: float = 30.0) -> None:
        """Let all monitors write out what they have, for at most `timeout` seconds together."""
        deadline = time.monotonic() + timeout
        for each in self._behind:
            each.end()
        for each in self._behind:
            each.join(deadline - time.monotonic())


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats, so that threads hold no tensors; values that are not numbers are left out."""
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            figures[name] = float(value)
    return figures


def _run(config: JobFile, kind: str, resumed_from: int) -> MonitoredRun:
    directory = os.path.abspath(config.job.dir)
    return MonitoredRun(
        directory=directory,
        project=config.monitor.project,
        group=config.monitor.group,
        name=config.job.name or os.path.basename(directory),
        config=config.model_dump(mode="json"),
        options=config.monitor.options.get(kind, {}),
        resumed_from=resumed_from,
    )


LIMIT = 256  # calls that wait for a monitor; further ones are dropped and counted
PATIENCE = 5  # failures in a row after which a monitor that gives up is switched off

Call = Callable[[Monitor], None]


class MonitorThread:
    """Queues calls for a monitor that its own thread makes and calls.

    If `make` raises, it is called again before the next call. FencedError from `check`, which is called before each
    call, switches the monitor off.
    """

    def __init__(
        self, kind: str, make: Callable[[], Monitor], check: Callable[[], None], *, gives_up: bool = True
    ) -> None:
        self._kind, self._make, self._check, self._gives_up = kind, make, check, gives_up
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._monitor: Monitor | None = None
        self._row, self._off = 0, False
        self._made: Future[None] = Future()
        self.failures = self.dropped = 0
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._work, name=f"monitor-{kind}", daemon=True)
        self._thread.start()

    def ready(self, timeout: float) -> None:
        with suppress(TimeoutError):
            self._made.result(timeout)

    def put(self, call: Call) -> None:
        """Queue a call; never waits."""
        if self._off:
            return
        if self._calls.qsize() < LIMIT:
            self._calls.put(call)
            return
        self.dropped += 1
        if self.dropped == 1:
            self._log.warning("monitor_fell_behind", detail="figures for it are dropped", monitor=self._kind)

    def end(self) -> None:
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            self._log.warning(
                "monitor_close_timed_out", detail="it may lack the last figures", monitor=self._kind
            )

    def _work(self) -> None:
        self._try(lambda _: None)
        if not self._made.done():
            self._made.set_result(None)
        for call in iter(self._calls.get, None):
            if not self._off:
                self._try(call)
        if self._monitor is not None:
            self._try(lambda monitor: monitor.close())

    def _try(self, call: Call) -> None:
        try:
            if self._monitor is None:
                self._monitor = self._make()
            self._check()  # here, not in the loop: this process may have been stopped since the call was queued
            call(self._monitor)
        except FencedError:
            self._off = True
        except Exception as error:  # noqa: BLE001 -- whatever a service's library raises
            self._failed(error)
            if isinstance(error, ConfigError) and not self._made.done():
                self._made.set_exception(error)
        else:
            self._row = 0

    def _failed(self, error: Exception) -> None:
        self.failures, self._row = self.failures + 1, self._row + 1
        reason = f"{type(error).__name__}: {error}"
        if self.failures == 1:
            self._log.warning("monitor_failed", monitor=self._kind, reason=reason)
        if self._gives_up and self._row == PATIENCE:
            self._off = True
            self._log.warning("monitor_disabled", monitor=self._kind, reason=reason)
