"""The one interface of monitors.

A monitor is registered under the entry point group `trainer.monitors` as a callable that takes a `Run`.
It may raise whatever it likes: `trainer.monitors.several.Monitors`, which the loop talks to, says so and goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GROUP = "trainer.monitors"


@dataclass(frozen=True, slots=True)
class Run:
    """What a monitor is told about the run.

    Args:
        directory: The job directory.
        project: The project's name.
        group: The name of the group of runs; may be empty.
        name: The run's name.
        config: The resolved configuration as plain data.
        options: What the configuration has for this kind.
        resumed_from: The step that the run goes on from, 0 at the first start. Later steps may be logged again.
    """

    directory: str
    project: str
    group: str
    name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    resumed_from: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout to look at: texts, or token ids as text where there is no tokenizer."""

    prompt: str
    response: str
    reward: float
    generation: int
    step: int
    group: str
    task: str
    explorer: str


class Monitor(Protocol):
    """Takes figures and rollouts."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the figures of a step."""

    def log_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Take rollouts that were trained on."""

    def close(self) -> None:
        """Write out what is left."""
