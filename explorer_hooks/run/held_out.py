"""Held-out tasks in the run of an explorer: who works on them, and what measures versions by them.

A part registers what opens the evaluation sets of a file under `explorer.evaluation`. Without it nothing is measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from explorer_hooks.run.extensions import EVALUATION
from explorer_hooks.run.generation import Sampling
from explorer_hooks.run.own_files import Records
from explorer_hooks.run.scoring import Scorer
from explorer_hooks.tasks.order import Tasks
from syncd.jobfile.evaluation import EvaluationSet
from syncd.jobfile.model import JobFile
from syncd.protocol.version import Pair
from syncd.registered import registered

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HeldOut:
    name: str  # its name, empty for the one of [explorer.evaluation] itself
    section: EvaluationSet  # its keys
    tasks: Tasks
    max_tokens: int  # tokens of a response at most
    scorer: Scorer  # scores responses
    key: str  # names what is measured: two measurements with one key differ in the weights alone


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    rewards: Sequence[float] = ()  # the reward of each response; none if one of them has none
    tokens: int = 0  # tokens of all responses
    truncated: int = 0  # responses that were cut off at the most tokens


Outcomes = Sequence[TaskOutcome]  # what became of each task of a set, in order


class Evaluator(Protocol):
    """Has the engine work on held-out tasks."""

    def outcomes(self, held_out: HeldOut, pair: Pair) -> Outcomes | None:
        """Return what became of each task of a set, None if it was told to stop or the engine ran another version."""


class VersionWatcher(Protocol):
    """Hears of each version that the engine runs, before work goes on."""

    def applied(self, pair: Pair, digest: str, *, is_last: bool = False) -> None:
        """Measure a version that was just applied by the sets that are due.

        Args:
            digest: The digest of its weights, empty for the model that the engine started with.
            is_last: Whether no version comes after it: then all sets are due.
        """


class EvaluationSets(Protocol):
    """The evaluation sets of a file, opened."""

    @property
    def scorers(self) -> Sequence[Scorer]:
        """Return what scores each set; none without sets."""

    def watcher(self, evaluator: Evaluator, records: Records) -> VersionWatcher | None:
        """Return what measures versions and writes a line for each set and version, None without sets."""

    def watcher_by_prompts(self, sampling: Sampling, records: Records) -> VersionWatcher | None:
        """Return the same where the engine answers each prompt."""


class _NoSets:
    scorers: Sequence[Scorer] = ()

    def watcher(self, evaluator: Evaluator, records: Records) -> None:
        """Return that nothing measures versions."""

    def watcher_by_prompts(self, sampling: Sampling, records: Records) -> None:
        """Return the same."""


@contextmanager
def open_evaluation(file: JobFile, scorer: Scorer) -> Iterator[EvaluationSets]:
    """Yield the evaluation sets that the run of an explorer measures."""
    openers = [point.load() for point in registered(EVALUATION).values()]
    if not openers:
        yield _NoSets()
        return
    opened: AbstractContextManager[EvaluationSets] = openers[0](file, scorer)
    with opened as sets:
        yield sets


def warn_skipped(held_out: HeldOut, pair: Pair) -> None:
    _LOG.warning("evaluation_skipped", generation=pair[0], step=pair[1], set=held_out.name)
