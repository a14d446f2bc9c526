"""All tasks of a program, and their order, which follows from seed and epoch: a restart needs only a position."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import fmean
from typing import overload

from explorer_hooks.tasks.task import Task, TaskSet
from syncd.protocol.digest import hasher

TASK_SET = "task_set"  # the field of a task that names its set, if there are several


@dataclass(frozen=True, slots=True)
class NamedSet:
    name: str
    tasks: TaskSet
    weight: float  # its share of an epoch in relation to the other sets


@dataclass(frozen=True)
class Tasks(Sequence[Task]):
    """The tasks of one set, or of several sets one after the other."""

    sets: tuple[NamedSet, ...]  # the sets, at least one

    @cached_property
    def digest(self) -> str:
        """Return the digest of the tasks, and of what their order follows from besides a seed."""
        if len(self.sets) == 1:
            return self.sets[0].tasks.digest
        made = hasher()
        for task_set in self.sets:
            made.update(f"{task_set.name}\n{task_set.tasks.digest}\n{task_set.weight!r}\n".encode())
        return str(made.hexdigest())

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int, /) -> Task: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice, /) -> Task | Sequence[Task]:
        """Return a task. Those of several sets have the name of their set before their id, and in `task_set`."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._ends, index)
        task_set = self.sets[number]
        task = task_set.tasks[index - self._start(number)]
        if len(self.sets) == 1:
            return task
        return Task(
            f"{task_set.name}/{task.id}", task.prompt, task.answer, {**task.info, TASK_SET: task_set.name}
        )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Return how many tasks an epoch has of each set, at least one."""
        whole, weights = len(self), sum(task_set.weight for task_set in self.sets)
        return tuple(max(1, round(whole * task_set.weight / weights)) for task_set in self.sets)

    @property
    def epoch_length(self) -> int:
        """Return how many tasks an epoch has: all, if no set has a weight of its own."""
        return sum(self.quotas)

    def order(self, seed: str | None, epoch: int) -> Sequence[int]:
        """Return the indices of an epoch's tasks in their order, with the seed None in the order of the source.

        Each set is gone through in passes of its own, which do not end with the epoch: all its tasks are taken once
        before one of them is taken again.
        """
        return _order(self, seed, epoch)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(task_set.tasks) for task_set in self.sets))

    def _start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def __hash__(self) -> int:
        return id(self)

    def mixed(self, seed: str | None, epoch: int) -> Iterator[int]:
        places = [self._places(number, seed, epoch) for number in range(len(self.sets))]
        for number in _turns(self.quotas, f"{seed}/{epoch}" if seed is not None else None):
            yield self._start(number) + next(places[number])

    def _places(self, number: int, seed: str | None, epoch: int) -> Iterator[int]:
        task_set, quota = self.sets[number], self.quotas[number]
        of_set = f"{seed}/{task_set.name}" if seed is not None else None
        cycle, start = divmod(epoch * quota, len(task_set.tasks))
        while quota:
            order = _shuffled(len(task_set.tasks), f"{of_set}/{cycle}" if of_set is not None else None)
            part = order[start : start + quota]
            yield from part
            cycle, start, quota = cycle + 1, 0, quota - len(part)


@lru_cache(maxsize=8)
def _order(tasks: Tasks, seed: str | None, epoch: int) -> Sequence[int]:
    if len(tasks.sets) > 1:
        return list(tasks.mixed(seed, epoch))
    return _shuffled(len(tasks), f"{seed}/{epoch}" if seed is not None else None)


def _shuffled(count: int, seed: str | None) -> Sequence[int]:
    if seed is None:
        return range(count)
    places = list(range(count))
    random.Random(seed).shuffle(places)  # noqa: S311 - not a secret
    return places


def _turns(quotas: Sequence[int], seed: str | None) -> list[int]:
    """Return from which set each task of an epoch comes: at random, or evenly spread."""
    if seed is None:
        spread = sorted(
            ((at + 0.5) / quota, number) for number, quota in enumerate(quotas) for at in range(quota)
        )
        return [number for _, number in spread]
    turns = [number for number, quota in enumerate(quotas) for _ in range(quota)]
    random.Random(f"{seed}/sets").shuffle(turns)  # noqa: S311 - not a secret
    return turns


def set_figures(rewards: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return groups and mean reward of each set, given the mean reward of each of its groups."""
    return {name: {"groups": len(means), "reward": fmean(means)} for name, means in sorted(rewards.items())}


def epochs(tasks: Tasks, seed: str | None, epoch: int, position: int) -> Iterator[tuple[int, int, Task]]:
    """Yield epoch, index and task from a position on, without end; seed None is the order of the source."""
    while True:
        places = tasks.order(seed, epoch)
        for at in range(position, len(places)):
            yield epoch, at, tasks[places[at]]
        epoch, position = epoch + 1, 0
