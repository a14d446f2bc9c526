"""Which steps are best by a figure: those are pinned, and a run that finds no better one for long enough ends."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from syncd.errors import storage_error
from syncd.figures import RENAMED
from syncd.jobfile.trainer_sections import SelectionSection
from syncd.protocol.disk import exists
from syncd.protocol.documents import MAX_INTEGER, Fields
from syncd.protocol.layout import Job
from syncd.protocol.request import Pin, read_pins, remove_pin, write_pin

OF_VERSIONS = "eval/"  # figures of this kind are of the step in `eval/step`, others of the step that has them

_REASON = "selection: "
"""How the reason of a pin begins that the trainer made; others are a person's and stay."""


class Selection:
    """Compares steps by a figure.

    A step may be compared before it is sealed, or never be written: the best of those that are there are pinned.
    """

    def __init__(self, section: SelectionSection, job: Job) -> None:
        self._section, self._job = section, job
        self._best: float | None = None
        self._since = 0
        self._values: dict[int, float] = {}
        self._compared: set[int] = set()
        self._is_settled = True
        self._log = structlog.get_logger()

    @property
    def over(self) -> str:
        section = self._section
        if not section.patience or self._since < section.patience:
            return ""
        return f"{section.metric} no better than {self._best:g} for {self._since} values"

    def observe(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare the value that metrics of a step have, if they have one; an evaluated version counts once."""
        value = metrics.get(self._section.metric)
        if value is None or not abs(value) <= MAX_INTEGER:  # what a state cannot hold, and what is no number
            return
        if self._section.metric.startswith(OF_VERSIONS):
            step = int(metrics["eval/step"])
            if step in self._compared:
                return
            self._compared.add(step)
        self._values[step] = value
        self._is_settled = False
        if self._best is None or self._gain(value, self._best) > self._section.min_delta:
            self._best, self._since = value, 0
        else:
            self._since += 1

    def keep(self) -> None:
        """Pin the best steps that are there and unpin those that were; what the storage refuses is tried again."""
        if self._is_settled or not self._section.metric or not self._section.keep_best:
            return
        try:
            self._pin(self._present())
        except OSError as error:
            self._is_settled = False
            self._log.warning("pin_failed", reason=str(storage_error(error, self._job.pins)))

    def state_dict(self) -> dict[str, Any]:
        if not self._section.metric:
            return {}
        values = [{"step": step, "value": value} for step, value in sorted(self._values.items())]
        state = {"metric": self._section.metric, "best": self._best, "since": self._since}
        return state | {"values": values, "compared": sorted(self._compared)}

    def load_state_dict(
        self, state: Mapping[str, Any], evaluations: Iterable[Mapping[str, float]] = ()
    ) -> None:
        """Resume from a state; one of another figure is forgotten, and so are pins of steps after it.

        Args:
            evaluations: All that are known of the run. Those that the state does not have are compared before a pin
                is removed; under another figure they say what is best, and not that the run has gone on for too long.
        """
        metric = str(state.get("metric", ""))
        is_of_figure = bool(metric) and RENAMED.get(metric, metric) == self._section.metric
        if is_of_figure:
            fields = Fields(state, "trainer.json: selection")
            self._best = None if state.get("best") is None else fields.number("best")
            self._since = fields.integer("since")
            self._values = {
                record.integer("step"): record.number("value") for record in fields.records("values")
            }
            self._compared = set(fields.integers("compared"))
        self.observe_all(evaluations)
        self._since = self._since if is_of_figure else 0
        self._is_settled = False
        self.keep()

    def observe_all(self, evaluations: Iterable[Mapping[str, float]]) -> None:
        if self._section.metric.startswith(OF_VERSIONS):
            for figures in evaluations:
                self.observe(figures, int(figures["eval/step"]))

    def _gain(self, value: float, other: float) -> float:
        return value - other if self._section.goal == "max" else other - value

    def _present(self) -> list[int]:
        """Return the best steps that are there, the best first; of equal ones the older."""
        there = [step for step in self._values if exists(self._job.disk, self._job.step(step))]
        there.sort(key=lambda step: (self._gain(0.0, self._values[step]), step))
        best, newest = there[: self._section.keep_best], max(there, default=-1)
        # Steps are sealed in order: what is older than a sealed one and is not there will not come.
        self._values = {step: value for step, value in self._values.items() if step in best or step > newest}
        self._is_settled = set(self._values) == set(best)
        return best

    def _pin(self, best: list[int]) -> None:
        pins = read_pins(self._job)
        ours = {step for step, pin in pins.items() if pin.reason.startswith(_REASON)}
        for step in best:
            if step not in pins:
                reason = f"{_REASON}{self._section.metric} {self._values[step]:.6g}"
                write_pin(self._job, Pin(step, reason, time.time()))
                self._log.info("step_pinned", step=step, reason=reason)
        for step in ours.difference(best):
            with contextlib.suppress(FileNotFoundError):
                remove_pin(self._job, step)
