"""Greedy rollouts of held-out tasks: how good a version is, one line for each version that is visited."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import structlog

from explorer_hooks.explorer.generation import Ask, Generator, Made
from explorer_hooks.explorer.records import Records
from explorer_hooks.explorer.rewards import plain_task
from explorer_hooks.explorer.scoring import Scorer
from explorer_hooks.explorer.tasks import Tasks
from explorer_hooks.explorer.tokens import Tokens
from syncd.protocol.version import Pair

_ATTEMPTS = 3
_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation found.

    Args:
        pair: The version that made every rollout.
        rewards: The reward of each task; None where there is none.
        tokens: Tokens of all responses.
    """

    pair: Pair
    rewards: Sequence[float | None]
    tokens: int


class Evaluation:
    """Evaluates every n-th version that is applied, the first one included, each at most once.

    Args:
        tasks: The held-out tasks.
        every: Versions from one evaluation to the next.
        records: Where lines go; versions that it names already are not visited again.
        tokens: The tokenizer.
        generator: Makes rollouts.
        scorer: Scores them.
        max_tokens: Tokens of a response at most.
        stop: Once true, it is given up.
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
        """Evaluate a version that has just been applied, if its turn has come.

        Raises:
            EngineDeadError: Nothing can be generated any more.
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

    def _result(self, pair: Pair) -> Result | None:
        """Return what a version does on all tasks, None where that could not be found out."""
        for _ in range(_ATTEMPTS):
            made = self._made()
            if made is None:
                return None
            if all((one.first, one.last) == (pair, pair) or one.problem for one in made) and not any(
                one.again for one in made
            ):
                return self._scored(pair, made)
        _LOG.warning("evaluation_skipped", generation=pair[0], step=pair[1])
        return None

    def _made(self) -> list[Made] | None:
        asks = [Ask(self._tokens.encode(task.prompt), 1, self._max_tokens, 0.0) for task in self._tasks.all]
        with closing(self._generator.generate(asks)) as coming:
            made = [one for one in coming if one is not None]
        return None if self._stop() else sorted(made, key=lambda one: one.place)

    def _scored(self, pair: Pair, made: Sequence[Made]) -> Result:
        calls = [
            (task.text, one.rollouts[0].text, plain_task(task))
            for one in made
            if one.rollouts
            for task in (self._tasks.all[one.place],)
        ]
        rewards: list[float | None] = [score.reward for score in self._scorer.score(calls)]
        missing = [None] * (len(self._tasks.all) - len(rewards))
        return Result(
            pair, [*rewards, *missing], sum(len(one.rollouts[0].tokens) for one in made if one.rollouts)
        )


def _line(found: Result, seconds: float) -> dict[str, object]:
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
