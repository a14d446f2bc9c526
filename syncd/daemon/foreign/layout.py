"""A layout: how one framework lays out the steps of a job, as data.

Layouts differ in the names of step directories, in where the weights are, and in what tells that their writer is
done.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncd.daemon.foreign.directory import StepDirectory
from syncd.daemon.foreign.weights import StepWeights
from syncd.protocol.layout import MAX_STEP
from syncd.protocol.step import Step, StepState


@dataclass(frozen=True, slots=True)
class ForeignLayout:
    """How one framework lays out steps.

    Args:
        name: The step's layout in the version file, so that a reader knows how to load it.
        step_of: Returns the step of a directory name, None for any name that is not exactly one.
        find: Returns the weights of a step directory, None for one that is not of this layout.
        is_full: Returns whether training can resume from the step.
        announced_by: What tells that a step's writer is done: a file in the step (itself), the job's marker or
            tracker file (marker), or that the step has not changed for a while (time).
    """

    name: str
    step_of: Callable[[str], int | None]
    find: Callable[[StepDirectory], StepWeights | None]
    is_full: Callable[[StepDirectory], bool]
    announced_by: Literal["itself", "marker", "time"]

    def examine(self, directory: StepDirectory, name: str, step: int) -> Step | None:
        """Return the state of a step directory, None for one that is not of this layout."""
        weights = self.find(directory)
        if weights is None:
            return None
        place = f"{name}/{weights.place}" if weights.place else name
        return Step(
            step=step,
            directory=name,
            layout=self.name,
            state=weights.state,
            payload=weights.uri or place,
            kind=weights.kind,
            digest="" if weights.state is StepState.FILLING else weights.fingerprint,
            present=weights.present,
            expected=weights.expected,
            size=weights.size,
            full=self.is_full(directory),
            problem=weights.problem,
            announced_by=self.announced_by,
        )


def numbered_after(prefix: str) -> Callable[[str], int | None]:
    """Return a strict parser of names that are a prefix and a step, without leading zeros and in ASCII."""
    pattern = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]{{0,15}})", re.ASCII)

    def step_of(name: str) -> int | None:
        match = pattern.fullmatch(name)
        step = int(match[1]) if match else None
        return step if step is not None and step <= MAX_STEP else None

    return step_of
