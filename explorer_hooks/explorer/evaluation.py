"""Greedy responses to held-out tasks: how good a version is, one line for each version that is evaluated."""

import time
from collections.abc import Sequence
from contextlib import closing

import structlog

from explorer_hooks.explorer.generation import GroupRequest, GroupResult, Sampling
from explorer_hooks.explorer.own_files import Records
from explorer_hooks.explorer.tasks import Tasks
from syncd.protocol.version import Pair

_ATTEMPTS = 3
_LOG = structlog.get_logger()


class Evaluation:
    """Evaluates every n-th applied version, beginning with the first, each at most once.

    Args:
        tasks: The held-out tasks.
        records: Gets the lines; versions that it names already are not evaluated again.
        sampling: Generates responses and scores them; once it stops, the evaluation is given up.
    """

    def __init__(self, tasks: Tasks, records: Records, sampling: Sampling) -> None:
        self._tasks, self._records, self._sampling = tasks, records, sampling
        self._visited = {(line.get("generation"), line.get("step")) for line in records.all()}
        self._since = self._every = sampling.file.explorer.evaluation.every

    def applied(self, pair: Pair) -> None:
        """Evaluate a version that was just applied, if it is due.

        Raises:
            EngineDeadError: The engine can generate nothing any more.
            StorageError: The line cannot be written.
        """
        if pair in self._visited:
            self._since = 1
            return
        if self._since < self._every:
            self._since += 1
            return
        begin = time.monotonic()
        groups = self._groups_of(pair)
        if groups is None:
            return
        self._since = 1
        self._visited.add(pair)
        self._records.add(self._line(pair, groups, begin))

    def _groups_of(self, pair: Pair) -> list[GroupResult] | None:
        """Return what a version generates for all tasks, None if that could not be determined."""
        for _ in range(_ATTEMPTS):
            groups = self._groups()
            if groups is None:
                return None
            are_of_pair = all((one.first, one.last) == (pair, pair) or one.problem for one in groups)
            if are_of_pair and not any(one.retry for one in groups):
                return groups
        _LOG.warning("evaluation_skipped", generation=pair[0], step=pair[1])
        return None

    def _groups(self) -> list[GroupResult] | None:
        prompts = [self._sampling.tokens.encode(task.prompt) for task in self._tasks.all]
        most = self._sampling.file.explorer.sampling.max_tokens
        requests = [GroupRequest(prompt, 1, most, 0.0) for prompt in prompts]
        with closing(self._sampling.generator.generate(requests)) as coming:
            groups = [one for one in coming if one is not None]
        return None if self._sampling.stop() else sorted(groups, key=lambda one: one.index)

    def _line(self, pair: Pair, groups: Sequence[GroupResult], begin: float) -> dict[str, object]:
        answered = [(self._tasks.all[one.index], one.responses[0]) for one in groups if one.responses]
        scores = self._sampling.scores(answered)
        rewards = [score.reward for score in scores if score.reward is not None]
        return {
            "generation": pair[0],
            "step": pair[1],
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "tasks": len(rewards),
            "failed": len(self._tasks.all) - len(rewards),
            "tokens": sum(len(response.tokens) for _, response in answered),
            "seconds": round(time.monotonic() - begin, 3),
            "at": time.time(),
        }
