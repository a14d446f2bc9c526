"""All monitors of a run as one, which cannot stop training: it never raises and never waits for them.

    monitors = Monitors.open(config, resumed_from=step)
    monitors.log({"reward/mean": 0.5}, step)
    monitors.log_rollouts(choose(batch, config.monitor.preview, decode), step)
    monitors.close()

metrics.jsonl is always written; further kinds are asked for in [monitor] kinds. Only rank 0 opens them.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from syncd.errors import ConfigError
from trainer.config.model import JobConfig
from trainer.monitors.base import Rollout, Run
from trainer.monitors.behind import Behind
from trainer.monitors.jsonl import Jsonl
from trainer.monitors.kinds import Make, find, installed, unknown

FAILURES = "monitor/failures"
"""Calls that monitors failed at since the start."""

DROPPED = "monitor/dropped"
"""Calls that monitors did not keep up with since the start."""

START = 10.0
"""Seconds that the start waits for monitors to look at their options."""


class Monitors:
    """What the loop talks to.

    Args:
        behind: The monitors.
    """

    def __init__(self, behind: Sequence[Behind]) -> None:
        self._behind = tuple(behind)

    @classmethod
    def open(cls, config: JobConfig, resumed_from: int) -> "Monitors":
        """Start the monitors of a job.

        Args:
            config: The resolved configuration.
            resumed_from: The step that the run goes on from, 0 at the first start.

        Raises:
            ConfigError: A kind is not known, its package is not there, or it refuses its options.
        """
        makes: dict[str, Make] = {"jsonl": Jsonl} | {kind: find(kind) for kind in config.monitor.kinds}
        _check_named(config)
        runs = {kind: _run(config, kind, resumed_from) for kind in makes}
        opened = cls([Behind(kind, partial(make, runs[kind])) for kind, make in makes.items()])
        opened._ready()
        return opened

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the figures of a step to all monitors, and how many calls they failed at or missed."""
        figures = _plain(metrics) | self.metrics()
        for each in self._behind:
            each.put(lambda monitor: monitor.log(figures, step))

    def log_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Hand rollouts to all monitors."""
        if rollouts:
            for each in self._behind:
                each.put(lambda monitor: monitor.log_rollouts(tuple(rollouts), step))

    def metrics(self) -> dict[str, float]:
        """Return how the monitors themselves do."""
        failures = sum(each.failures for each in self._behind)
        return {FAILURES: float(failures), DROPPED: float(sum(each.dropped for each in self._behind))}

    def close(self, timeout: float = 30.0) -> None:
        """Let all write out what they have, for at most `timeout` seconds together."""
        deadline = time.monotonic() + timeout
        for each in self._behind:
            each.end()
        for each in self._behind:
            each.join(deadline - time.monotonic())

    def _ready(self) -> None:
        deadline = time.monotonic() + START
        try:
            for each in self._behind:
                each.ready(max(deadline - time.monotonic(), 0.0))
        except ConfigError:
            for each in self._behind:
                each.end()
            raise


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return figures as floats: threads must hold no tensor. What is no number is left out."""
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            figures[name] = float(value)
    return figures


def _check_named(config: JobConfig) -> None:
    """Options for a kind that is not asked for are kept for later; for one that is not known they are a mistake."""
    kinds = installed()
    for kind in config.monitor.options:
        if kind not in kinds:
            raise unknown(f"monitor.options.{kind}: no monitor is called {kind!r}", kind, kinds)


def _run(config: JobConfig, kind: str, resumed_from: int) -> Run:
    directory = os.path.abspath(config.job.dir)
    return Run(
        directory=directory,
        project=config.monitor.project,
        group=config.monitor.group,
        name=config.job.name or os.path.basename(directory),
        config=config.model_dump(mode="json"),
        options=config.monitor.options.get(kind, {}),
        resumed_from=resumed_from,
    )
