"""A layout: one way in which others lay out the steps of a job, as data.

Layouts differ in the names of step directories, in where the weights are and in what tells that their writer
is done; all the rest is the same for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncd.daemon.foreign.look import Look
from syncd.daemon.foreign.weights import Weights
from syncd.daemon.snapshot import State, Step


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of laying out steps.

    Args:
        name: What is published as the step's layout, so that a reader knows how to load it.
        step_of: The step of a directory name of the job, None for any name that is not exactly one.
        find: The weights of a step directory, None for one that is not of this layout.
        is_full: Whether the step can be resumed from.
        announced_by: What tells that a step's writer is done: a file of its own (itself), the job's marker or
            tracker file (marker), or that it stands still (time).
    """

    name: str
    step_of: Callable[[str], int | None]
    find: Callable[[Look], Weights | None]
    is_full: Callable[[Look], bool]
    announced_by: Literal["itself", "marker", "time"]

    def examine(self, look: Look, directory: str, step: int) -> Step | None:
        """Return the state of a step directory, None for one that is not of this layout."""
        weights = self.find(look)
        if weights is None:
            return None
        place = f"{directory}/{weights.place}" if weights.place else directory
        return Step(
            step=step,
            directory=directory,
            layout=self.name,
            state=weights.state,
            payload=weights.uri or place,
            kind=weights.kind,
            digest="" if weights.state is State.FILLING else weights.fingerprint,
            present=weights.present,
            expected=weights.expected,
            size=weights.size,
            full=self.is_full(look),
            problem=weights.problem,
            announced_by=self.announced_by,
        )
