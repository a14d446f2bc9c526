"""Which tasks are taken, by the rewards that this explorer's own rollouts of them had."""

import random
from collections.abc import Sequence
from dataclasses import replace

from explorer_hooks.run.own_files import Key, KeyedGroup, Records
from syncd.errors import UsageError
from syncd.experience.model import Experience
from syncd.jobfile.explorer_sections import CurriculumSection, RewardSection

DIFFICULTY = "difficulty.jsonl"
"""A line for each batch: the task and the mean reward of each group that was measured with it."""

_NEWEST = 0.5  # the share of the newest measurement in a task's mean
TaskMean = tuple[str, float]  # a task's id, and the mean reward of a group of its rollouts


class Curriculum:
    """Takes a task with a probability that is highest where half of the rewards were had.

    A task whose mean reward is p, on a scale from 0 to 1, is taken with probability 4 p (1 - p), at least `floor`;
    one that was never measured always. Whether a place is taken follows from the seed, the place and what was
    measured, so a place that is asked about twice is answered alike. Several threads call it.

    Args:
        records: What was measured, also by earlier processes; gets what is measured.
    """

    def __init__(self, section: CurriculumSection, records: Records, seed: str) -> None:
        self._section, self._records, self._seed = section, records, seed
        self._means: dict[str, float] = {}
        for line in records.all() if section.enabled else ():
            self._learn(line.get("rewards", []))

    def takes(self, epoch: int, position: int, task: str) -> bool:
        if not self._section.enabled:
            return True
        chance = random.Random(f"{self._seed}/curriculum/{epoch}.{position}").random()  # noqa: S311 - not a secret
        return chance < self.probability(task)

    def probability(self, task: str) -> float:
        mean = self._means.get(task)
        if mean is None:
            return 1.0
        low, high = self._section.lowest, self._section.highest
        share = min(max((mean - low) / (high - low), 0.0), 1.0)
        return max(4.0 * share * (1.0 - share), self._section.floor)

    def measured(self, rewards: Sequence[TaskMean]) -> None:
        """Record the mean rewards of groups, of which a task may have several."""
        if self._section.enabled and rewards:
            self._records.add({"rewards": list(rewards)})
            self._learn(rewards)

    def _learn(self, rewards: Sequence[TaskMean]) -> None:
        for task, reward in rewards:
            before = self._means.get(task, reward)
            self._means[task] = before + _NEWEST * (reward - before)


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group are all the same: it teaches nothing to estimators that compare."""
    return len(set(rewards)) == 1


def with_dropped(
    groups: Sequence[KeyedGroup[Key]], dropped: int, reward: RewardSection
) -> Sequence[KeyedGroup[Key]]:
    """Return a batch that tells the trainer how many groups of equal rewards were dropped for it, if any may be.

    They are shared among its groups, each of which may be trained in another step; the first row of each says it.
    """
    if reward.equal_groups != "drop":
        return groups
    share = dropped / len(groups)
    return [(key, [_with_info(first, share), *rest]) for key, (first, *rest) in groups]


def _with_info(row: Experience, share: float) -> Experience:
    try:
        return replace(row, info={**row.info, "equal_dropped": round(share, 6)})
    except UsageError:  # its info is full
        return row
