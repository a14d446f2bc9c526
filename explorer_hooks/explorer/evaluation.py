"""Greedy responses to held-out tasks: how good a version is, one line for each version that is evaluated."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import structlog

from explorer_hooks.explorer.generation import Generator, GroupRequest, GroupResult
from explorer_hooks.explorer.own_files import Records
from explorer_hooks.explorer.rewards import plain_task
from explorer_hooks.explorer.scoring import Scorer
from explorer_hooks.explorer.tasks import Tasks, Tokens
from syncd.protocol.version import Pair

_ATTEMPTS = 3
_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation.

    Args:
        pair: The version that generated every response.
        rewards: The reward of each task; None if it has none.
        tokens: Tokens of all responses.
    """

    pair: Pair
    rewards: Sequence[float | None]
    tokens: int


class Evaluation:
    """Evaluates every n-th applied version, beginning with the first, each at most once.

    Args:
        tasks: The held-out tasks.
        every: Versions from one evaluation to the next.
        records: Gets the lines; versions that it names already are not evaluated again.
        tokens: The tokenizer.
        generator: Generates responses.
        scorer: Scores them.
        max_tokens: Tokens of a response at most.
        stop: Once it returns true, the evaluation is given up.
    """

    def __init__(
        self,
        tasks: Tasks,
        every: int,
        records: Records,
        tokens: Tokens,
        generator: Generator,
        scorer: Scorer,
        *,
        max_tokens: int,
        stop: Callable[[], bool],
    ) -> None:
        self._tasks, self._every, self._records = tasks, every, records
        self._tokens, self._generator, self._scorer = tokens, generator, scorer
        self._max_tokens, self._stop = max_tokens, stop
        self._visited = {(line.get("generation"), line.get("step")) for line in records.all()}
        self._since = every

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
        found = self._result(pair)
        if found is None:
            return
        self._since = 1
        self._visited.add(pair)
        self._records.add(_line(found, time.monotonic() - begin))

    def _result(self, pair: Pair) -> EvaluationResult | None:
        """Return how a version does on all tasks, None if that could not be determined."""
        for _ in range(_ATTEMPTS):
            groups = self._groups()
            if groups is None:
                return None
            if all((one.first, one.last) == (pair, pair) or one.problem for one in groups) and not any(
                one.retry for one in groups
            ):
                return self._scored(pair, groups)
        _LOG.warning("evaluation_skipped", generation=pair[0], step=pair[1])
        return None

    def _groups(self) -> list[GroupResult] | None:
        requests = [
            GroupRequest(self._tokens.encode(task.prompt), 1, self._max_tokens, 0.0)
            for task in self._tasks.all
        ]
        with closing(self._generator.generate(requests)) as coming:
            groups = [one for one in coming if one is not None]
        return None if self._stop() else sorted(groups, key=lambda one: one.index)

    def _scored(self, pair: Pair, groups: Sequence[GroupResult]) -> EvaluationResult:
        calls = [
            (task.text, one.responses[0].text, plain_task(task))
            for one in groups
            if one.responses
            for task in (self._tasks.all[one.index],)
        ]
        rewards: list[float | None] = [score.reward for score in self._scorer.score(calls)]
        missing = [None] * (len(self._tasks.all) - len(rewards))
        return EvaluationResult(
            pair, [*rewards, *missing], sum(len(one.responses[0].tokens) for one in groups if one.responses)
        )


def _line(found: EvaluationResult, seconds: float) -> dict[str, object]:
    rewards = [reward for reward in found.rewards if reward is not None]
    return {
        "generation": found.pair[0],
        "step": found.pair[1],
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "tasks": len(rewards),
        "failed": len(found.rewards) - len(rewards),
        "tokens": found.tokens,
        "seconds": round(seconds, 3),
        "at": time.time(),
    }
