"""Makes one batch: tasks become groups, groups are scored, and a group that cannot be used is dropped."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog

from explorer_hooks.hook import Unproven
from explorer_hooks.run.curriculum import Curriculum, TaskMean, are_equal
from explorer_hooks.run.engine_gate import EngineGate
from explorer_hooks.run.generation import GroupRequest, GroupResult, Response, Sampling
from explorer_hooks.run.own_files import TaskLedger
from explorer_hooks.run.rewards import Score
from explorer_hooks.tasks.order import TASK_SET, Tasks, epochs
from explorer_hooks.tasks.task import Task
from syncd.errors import ConfigError, EngineDeadError, UsageError
from syncd.experience.model import MAX_INFO, Experience
from syncd.protocol.version import Pair, label_of

MAX_FRUITLESS = 10  # attempts in a row in which an engine that reports to be working may generate nothing

_HINTS = {
    "engine": "see the log of the engine",
    "experience": "explorer config docs",
    "prompt": "explorer.sampling.max_prompt_tokens and the chat template of model.path bound what is taken",
    "reward": "try the function of explorer.reward.function on that task",
    "teacher": "see the log of the server of explorer.teacher.address",
}
_LOG = structlog.get_logger()

_SHOWN = MAX_INFO // 8  # characters of a prompt and of a response in the info of an experience


@dataclass
class ExplorerBatch:
    """One batch.

    Attributes:
        then: Epoch and position of its last task; None before the first.
        groups: The experiences of each group by epoch and position of its task.
        dropped: Groups that could not be used, by reason.
        tokens: Tokens of all responses.
        unproven: Those that are not learnt, because their version is not known or was not proven.
        unreadable_versions: Responses whose tokens' versions the engine named so that they cannot be read.
        untaught_groups: Groups without the log-probs of the teacher although there is one.
        equal_groups: Groups whose rewards are all the same.
        skipped: Tasks that the curriculum left out.
        measured: The task and the mean reward of each group, also of those dropped because all were the same.
        task_sets: The mean reward of each group by the set of its task, if there are several sets.
        versions: Responses by the oldest version that took part in them.
        pairs: All versions that took part in one.
    """

    then: tuple[int, int] | None = None
    groups: dict[tuple[int, int], list[Experience]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    unproven: int = 0
    unreadable_versions: int = 0
    untaught_groups: int = 0
    equal_groups: int = 0
    skipped: int = 0
    measured: list[TaskMean] = field(default_factory=list)
    task_sets: dict[str, list[float]] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    pairs: set[Pair] = field(default_factory=set)

    @property
    def experiences(self) -> list[Experience]:
        """Return its experiences, whole groups in the order of the tasks."""
        return [experience for _, group in sorted(self.groups.items()) for experience in group]


@dataclass(frozen=True, slots=True)
class EpochTask:
    epoch: int
    position: int  # its index in the order of that epoch
    task: Task
    prompt: Sequence[int]  # its token ids


class BatchMaker:
    """Makes batches of the next tasks; once `sampling` stops, an unfinished batch is given up."""

    def __init__(
        self, tasks: Tasks, ledger: TaskLedger, sampling: Sampling, gate: EngineGate, curriculum: Curriculum
    ) -> None:
        self._tasks, self._ledger, self._sampling, self._gate = tasks, ledger, sampling, gate
        self._curriculum = curriculum
        self._file = sampling.file
        self._failures, self._problem = 0, ""

    @property
    def is_over(self) -> bool:
        cursor = self._ledger.cursor
        return 0 < self._file.explorer.epochs <= cursor.epoch + (cursor.position >= self._tasks.epoch_length)

    def make(self) -> ExplorerBatch | None:
        """Return the next batch; None if it was told to stop, then nothing of the batch may be written."""
        batch = ExplorerBatch()
        coming = self._coming(batch)
        unfinished: list[EpochTask] = []
        fruitless = 0
        while not self._sampling.stop() and self._gate.wait_until_usable(is_suspect=fruitless > 0):
            unfinished += islice(
                coming, max(self._file.explorer_groups - len(batch.groups) - len(unfinished), 0)
            )
            if not unfinished:
                return batch
            left = self._generate(unfinished, batch)
            if len(left) < len(unfinished):
                fruitless = 0
            fruitless += bool(left)
            if fruitless == MAX_FRUITLESS:
                raise EngineDeadError(f"the engine generates nothing: {self._problem}")
            unfinished = left
        return None

    def done(self, batch: ExplorerBatch) -> None:
        """Record how difficult the tasks of a batch were, once it is written."""
        self._curriculum.measured(batch.measured)

    def _coming(self, batch: ExplorerBatch) -> Iterator[EpochTask]:
        cursor, seed = self._ledger.cursor, self._ledger.state.seed or None
        for epoch, position, task in epochs(self._tasks, seed, cursor.epoch, cursor.position):
            if 0 < self._file.explorer.epochs <= epoch:
                return
            batch.then = (epoch, position)
            if not self._curriculum.takes(epoch, position, task.id):
                batch.skipped += 1
                continue
            prompt, problem = self._prompt(task)
            if problem:
                self._drop(batch, "prompt", problem)
            else:
                yield EpochTask(epoch, position, task, prompt)

    def _prompt(self, task: Task) -> tuple[Sequence[int], str]:
        """Return the token ids of a task's prompt, and why it cannot be used, nothing if it can."""
        try:
            prompt = self._sampling.tokens.encode(task.prompt)
        except ValueError as error:
            return (), f"task {task.id}: {error}"
        fits = 0 < len(prompt) <= self._file.explorer.sampling.max_prompt_tokens
        return prompt, "" if fits else f"the prompt of task {task.id} has {len(prompt)} tokens"

    def _generate(self, unfinished: Sequence[EpochTask], batch: ExplorerBatch) -> list[EpochTask]:
        left = dict(enumerate(unfinished))
        file, most = self._file, self._file.explorer.sampling.max_tokens
        requests = [
            GroupRequest(task.prompt, file.data.group_size, most, file.algorithm.temperature)
            for task in unfinished
        ]
        with closing(self._sampling.generator.generate(requests)) as results:
            for result in results:
                if result is not None and result.retry:
                    self._problem = result.problem
                elif result is not None:
                    self._add(left.pop(result.index), result, batch)
                self._gate.update_during_work()
        return list(left.values())

    def _add(self, asked: EpochTask, result: GroupResult, batch: ExplorerBatch) -> None:
        if result.problem:
            self._drop(batch, "engine", result.problem)
            return
        if result.untaught and result.needs_teacher:
            self._drop(batch, "teacher", result.untaught)
            return
        group = self._scored(asked, result, batch)
        if group and not self._is_dropped_as_equal(asked, [experience.reward for experience in group], batch):
            batch.groups[asked.epoch, asked.position] = group
            batch.tokens += sum(len(response.tokens) for response in result.responses)
            batch.unproven += sum(experience.doubted for experience in group)
            batch.unreadable_versions += result.unreadable_versions
            batch.untaught_groups += bool(result.untaught)
            if len(self._tasks.sets) > 1:
                means = batch.task_sets.setdefault(asked.task.info[TASK_SET], [])
                means.append(statistics.fmean(experience.reward for experience in group))
            batch.versions.update(label_of((experience.generation, experience.step)) for experience in group)
            batch.pairs |= {result.first, result.last}.union(*(experience.versions for experience in group))

    def _is_dropped_as_equal(self, asked: EpochTask, rewards: Sequence[float], batch: ExplorerBatch) -> bool:
        self._failures = 0
        batch.measured.append((asked.task.id, statistics.fmean(rewards)))
        if not are_equal(rewards):
            return False
        reward = self._file.explorer.reward
        if (
            reward.equal_groups == "drop"
            and batch.dropped["equal"] < reward.most_equal * self._file.explorer_groups
        ):
            batch.dropped["equal"] += 1
            return True
        batch.equal_groups += 1
        return False

    def _scored(self, asked: EpochTask, result: GroupResult, batch: ExplorerBatch) -> list[Experience]:
        (scores,) = self._sampling.scores([(asked.task, result.responses)])
        problem = next((score.problem for score in scores if score.reward is None), "")
        if problem:
            self._drop(batch, "reward", f"task {asked.task.id}: {problem}")
            return []
        group = self._ledger.group(asked.epoch, asked.position)
        try:
            return [
                experience_of(asked, group, number, response, result, score, self._gate.unproven)
                for number, (response, score) in enumerate(zip(result.responses, scores, strict=True))
            ]
        except UsageError as error:
            self._drop(batch, "experience", f"task {asked.task.id}: {error}")
            return []

    def _drop(self, batch: ExplorerBatch, why: str, problem: str) -> None:
        batch.dropped[why] += 1
        self._failures, self._problem = self._failures + 1, problem
        _LOG.warning("group_dropped", why=why, problem=problem)
        if self._failures < self._file.explorer.reward.max_failures:
            return
        message = f"{self._failures} groups in a row could not be used, the last one because: {problem}"
        raise (EngineDeadError if why in ("engine", "teacher") else ConfigError)(message, hint=_HINTS[why])


def experience_of(
    asked: EpochTask,
    group: str,
    number: int,
    response: Response,
    result: GroupResult,
    score: Score,
    loads: Mapping[str, Unproven],
) -> Experience:
    """Return what the trainer gets of a response.

    If the engine does not name the versions of tokens and the version changed meanwhile, info names both. Called by
    the thread that has versions proven: while it is here, no proof is pending, and `loads` decides what is masked.
    """
    length, versions = len(response.tokens), result.versions_of(response).settled(loads)
    generation, step = versions.oldest
    assert score.reward is not None
    return Experience(
        tokens=[*asked.prompt, *response.tokens],
        prompt_length=len(asked.prompt),
        logprobs=response.logprobs,
        action_mask=[True] * length,
        reward=score.reward,
        group=group,
        task=asked.task.id,
        rollout=number,
        generation=generation,
        step=step,
        spans=versions.spans,
        teacher_logprobs=response.teacher_logprobs,
        unproven=versions.unproven,
        created_at=time.time(),
        info=_info(asked.task, response, result, score),
    )


def _info(task: Task, response: Response, result: GroupResult, score: Score) -> Mapping[str, Any]:
    """Return what is said of a response besides; what does not fit is left out, first what only people read."""
    info: dict[str, Any] = {"truncated": response.truncated}
    if result.teacher:
        info["teacher"] = result.teacher
    if response.versions is None and result.first != result.last:
        info["versions"] = [label_of(result.first), label_of(result.last)]
    shown = {"prompt": task.text[:_SHOWN], "response": response.text[:_SHOWN]}
    for part in ({"score": dict(score.info)}, shown, {"task": dict(task.info)}):
        larger = info | {name: value for name, value in part.items() if value != {}}
        if len(json.dumps(larger)) <= MAX_INFO:  # text that JSON escapes may become six times as long
            info = larger
    return info
