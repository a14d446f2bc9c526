"""Figures that come later than the step that they belong to, such as those of evaluations that explorers make.

A part registers what reads them under `trainer.late_figures`, and the curves of a job for `trainer plot` under
`trainer.late_curves`. Without a part there are none.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from syncd.client.client import Client
from syncd.registered import registered
from trainer.monitors.jsonl import History

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile  # needs pydantic, which `trainer plot` does without

FIGURES = "trainer.late_figures"
"""The group of entry points of what reads them: a function of the job's file and the trainer's connection."""

CURVES = "trainer.late_curves"  # the group of entry points of what returns the curves of a job directory


class LateFigures(Protocol):
    """Gives the figures of each version once, in the order of versions. Its state is part of full checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was given and what was abandoned, as plain JSON."""

    def resume(self, state: Mapping[str, Any], step: int, generation: int) -> None:
        """Go on from a state; versions beyond the step, up to a generation, are abandoned."""

    def all_figures(self) -> list[dict[str, float]]:
        """Return the figures of all versions that the run has not abandoned, in order, given or not."""

    def next_figures(self) -> dict[str, float]:
        """Return the figures of the oldest version of which some were not given, empty if there is none."""

    def remaining(self) -> Iterator[dict[str, float]]:
        """Look now, and yield the figures of each version of which some were not given."""

    def wait_for_last(self, step: int, is_stopped: Callable[[], bool], note: Callable[[str], None]) -> bool:
        """Wait while figures of the last step may still come; return false if some may when the time is over."""


class _NoFigures:
    """What a trainer has without a part that reads late figures. A state that it is given stays as it is."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def resume(self, state: Mapping[str, Any], step: int, generation: int) -> None:
        del step, generation
        self._state = dict(state)

    def all_figures(self) -> list[dict[str, float]]:
        return []

    def next_figures(self) -> dict[str, float]:
        return {}

    def remaining(self) -> Iterator[dict[str, float]]:
        return iter(())

    def wait_for_last(self, step: int, is_stopped: Callable[[], bool], note: Callable[[str], None]) -> bool:
        del step, is_stopped, note
        return True


def late_figures(config: "JobFile", client: Client) -> LateFigures:
    openers: list[Callable[[JobFile, Client], LateFigures]]
    openers = [point.load() for point in registered(FIGURES).values()]
    return openers[0](config, client) if openers else _NoFigures()


def late_curves(directory: str) -> History:
    """Return the late figures of a job by the steps that they belong to."""
    readers: list[Callable[[str], History]] = [point.load() for point in registered(CURVES).values()]
    return readers[0](directory) if readers else History()
