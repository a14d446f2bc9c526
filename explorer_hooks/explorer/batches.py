"""One batch: tasks are taken, groups made and scored, and what cannot be used is dropped by the group."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog

from explorer_hooks.explorer.cursor import Ledger
from explorer_hooks.explorer.generation import Ask, Generator, Made, Rollout
from explorer_hooks.explorer.rewards import Score, plain_task
from explorer_hooks.explorer.scoring import Scorer
from explorer_hooks.explorer.tasks import Task, Tasks, epochs
from explorer_hooks.explorer.tokens import Tokens
from syncd.errors import ConfigError, EngineDeadError, UsageError
from syncd.experience.model import MAX_INFO, Experience
from syncd.protocol.version import Pair, label_of

MAX_FRUITLESS = 10
"""Rounds in a row in which the engine may make nothing although it says that it works."""

_HINTS = {
    "engine": "see the log of the engine",
    "experience": "explorer config docs",
    "prompt": "explorer.sampling.max_prompt_tokens bounds them",
    "reward": "try the function of explorer.reward.function on that task",
}
_LOG = structlog.get_logger()

_SHOWN = MAX_INFO // 8
"""Characters of a prompt and of a response that an experience's info keeps."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch is made of.

    Args:
        groups: Groups.
        samples: Rollouts of a group.
        max_tokens: Tokens of a rollout at most.
        max_prompt_tokens: Tokens of a prompt at most.
        temperature: At which rollouts are sampled.
        epochs: Passes over the tasks; 0 for no end.
        max_failures: Groups in a row that may be dropped.
    """

    groups: int
    samples: int
    max_tokens: int
    max_prompt_tokens: int
    temperature: float
    epochs: int = 0
    max_failures: int = 64


@dataclass
class Batch:
    """What came out.

    Attributes:
        then: Epoch and position of the last task that was taken; None while there was none.
        experiences: Its experiences, whole groups in the order of the tasks.
        dropped: Groups that could not be used, by why.
        tokens: Tokens of all responses.
        versions: Rollouts by the oldest version that had a part in them.
        pairs: All versions that had a part in one.
    """

    then: tuple[int, int] | None = None
    experiences: list[Experience] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    pairs: set[Pair] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Taken:
    """A task that is being worked on.

    Args:
        epoch: Its epoch.
        position: Its place in the order of that epoch.
        task: The task.
        prompt: Its token ids.
    """

    epoch: int
    position: int
    task: Task
    prompt: Sequence[int]


class Batches:
    """Makes batches from where the tasks stand.

    Args:
        tasks: The tasks.
        seed: Of their order; None for the order of the file.
        ledger: Where they stand.
        tokens: The tokenizer.
        generator: Makes groups.
        scorer: Scores rollouts.
        shape: What a batch is made of.
        stop: Once true, what is in hand is given up.
        meanwhile: Called now and then while groups are being made.
        usable: Waits until the engine may be given work, and asks the engine itself first where it is called with
            true; returns false where it was told to stop.
    """

    def __init__(
        self,
        tasks: Tasks,
        seed: str | None,
        ledger: Ledger,
        tokens: Tokens,
        generator: Generator,
        scorer: Scorer,
        shape: Shape,
        *,
        stop: Callable[[], bool],
        meanwhile: Callable[[], None],
        usable: Callable[[bool], bool],
    ) -> None:
        self._tasks, self._seed, self._ledger, self._tokens = tasks, seed, ledger, tokens
        self._generator, self._scorer, self._shape = generator, scorer, shape
        self._stop, self._meanwhile, self._usable = stop, meanwhile, usable
        self._failures, self._problem = 0, ""

    @property
    def is_over(self) -> bool:
        """Return whether no task is left."""
        cursor = self._ledger.cursor
        return 0 < self._shape.epochs <= cursor.epoch + (cursor.position >= len(self._tasks.all))

    def make(self) -> Batch | None:
        """Return the next batch; None where it was told to stop, then nothing of it is to be written.

        Raises:
            SyncdError: Too many groups in a row could not be used, or the engine cannot go on.
        """
        batch = Batch()
        coming = self._coming(batch)
        done: dict[tuple[int, int], list[Experience]] = {}
        unfinished: list[Taken] = []
        fruitless = 0
        while not self._stop() and self._usable(fruitless > 0):
            unfinished += islice(coming, max(self._shape.groups - len(done) - len(unfinished), 0))
            if not unfinished:
                batch.experiences = [one for _, group in sorted(done.items()) for one in group]
                return batch
            left = self._round(unfinished, batch, done)
            if len(left) < len(unfinished):
                fruitless = 0
            fruitless += bool(left)
            if fruitless == MAX_FRUITLESS:
                raise EngineDeadError(f"the engine makes no rollouts: {self._problem}")
            unfinished = left
        return None

    def _coming(self, batch: Batch) -> Iterator[Taken]:
        """Yield the tasks that come next, and note in the batch how far that is."""
        cursor = self._ledger.cursor
        for epoch, position, task in epochs(self._tasks, self._seed, cursor.epoch, cursor.position):
            if 0 < self._shape.epochs <= epoch:
                return
            prompt = self._tokens.encode(task.prompt)
            batch.then = (epoch, position)
            if 0 < len(prompt) <= self._shape.max_prompt_tokens:
                yield Taken(epoch, position, task, prompt)
            else:
                self._drop(batch, "prompt", f"task {task.id} has {len(prompt)} tokens of a prompt")

    def _round(
        self, unfinished: Sequence[Taken], batch: Batch, done: dict[tuple[int, int], list[Experience]]
    ) -> list[Taken]:
        """Have groups made, and return those that are to be made again."""
        again = dict(enumerate(unfinished))
        asks = [self._ask(taken) for taken in unfinished]
        with closing(self._generator.generate(asks)) as coming:
            for made in coming:
                if made is not None:
                    self._take(made, again, batch, done)
                self._meanwhile()
        return list(again.values())

    def _take(
        self,
        made: Made,
        again: dict[int, Taken],
        batch: Batch,
        done: dict[tuple[int, int], list[Experience]],
    ) -> None:
        if made.again:
            self._problem = made.problem
            return
        taken = again.pop(made.place)
        if made.problem:
            self._drop(batch, "engine", made.problem)
            return
        group = self._scored(taken, made, batch)
        if group:
            self._failures = 0
            done[taken.epoch, taken.position] = group
            batch.tokens += sum(len(rollout.tokens) for rollout in made.rollouts)
            batch.versions[label_of(made.oldest)] += len(group)
            batch.pairs |= {made.first, made.last}

    def _scored(self, taken: Taken, made: Made, batch: Batch) -> list[Experience]:
        """Return the experiences of a group, none if one of its rollouts has no reward."""
        task = plain_task(taken.task)
        scores = self._scorer.score([(taken.task.text, one.text, task) for one in made.rollouts])
        problem = next((score.problem for score in scores if score.reward is None), "")
        if problem:
            self._drop(batch, "reward", f"task {taken.task.id}: {problem}")
            return []
        group = self._ledger.group(taken.epoch, taken.position)
        try:
            return [
                experience_of(taken, group, number, rollout, made, score)
                for number, (rollout, score) in enumerate(zip(made.rollouts, scores, strict=True))
            ]
        except UsageError as error:
            self._drop(batch, "experience", f"task {taken.task.id}: {error}")
            return []

    def _ask(self, taken: Taken) -> Ask:
        return Ask(taken.prompt, self._shape.samples, self._shape.max_tokens, self._shape.temperature)

    def _drop(self, batch: Batch, why: str, problem: str) -> None:
        batch.dropped[why] += 1
        self._failures, self._problem = self._failures + 1, problem
        _LOG.warning("group_dropped", why=why, problem=problem)
        if self._failures < self._shape.max_failures:
            return
        message = f"{self._failures} groups in a row could not be used, the last one because: {problem}"
        raise (EngineDeadError if why == "engine" else ConfigError)(message, hint=_HINTS[why])


def experience_of(
    taken: Taken, group: str, number: int, rollout: Rollout, made: Made, score: Score
) -> Experience:
    """Return what the trainer gets of a rollout.

    Where versions changed on the way nobody can say which one chose which token: the oldest one counts, and info
    names both.

    Raises:
        UsageError: It cannot be stored.
    """
    generation, step = made.oldest
    assert score.reward is not None
    return Experience(
        tokens=[*taken.prompt, *rollout.tokens],
        prompt_length=len(taken.prompt),
        logprobs=rollout.logprobs,
        action_mask=[True] * len(rollout.tokens),
        reward=score.reward,
        group=group,
        task=taken.task.id,
        rollout=number,
        generation=generation,
        step=step,
        created_at=time.time(),
        info=_info(taken.task, rollout, made, score),
    )


def _info(task: Task, rollout: Rollout, made: Made, score: Score) -> Mapping[str, Any]:
    shown: dict[str, Any] = {"prompt": task.text[:_SHOWN], "response": rollout.text[:_SHOWN]}
    if made.first != made.last:
        shown["versions"] = [label_of(made.first), label_of(made.last)]
    whole = {**shown, "score": dict(score.info), "task": dict(task.info)}
    whole = {name: value for name, value in whole.items() if value != {}}
    # Text that JSON has to escape may be six times as long there; the rest is for people and may be left out.
    return next((info for info in (whole, shown) if len(json.dumps(info)) <= MAX_INFO), {})
