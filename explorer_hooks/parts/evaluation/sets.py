"""Evaluation sets as they are measured: their tasks, and the figures of the responses to them."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict

from explorer_hooks.run.held_out import HeldOut, TaskOutcome
from explorer_hooks.run.open_explorer import open_reward
from explorer_hooks.run.scoring import Scorer
from explorer_hooks.tasks.sources import open_tasks
from explorer_hooks.tasks.task import Columns
from syncd.jobfile.evaluation import EvaluationSet, best_name, pass_name
from syncd.jobfile.model import JobFile
from syncd.jobfile.roles import runner_of
from syncd.protocol.digest import hasher

_KEY = 16


@contextmanager
def open_sets(
    file: JobFile, scorer: Scorer, is_wanted: Callable[[str, EvaluationSet], bool]
) -> Iterator[tuple[HeldOut, ...]]:
    """Yield the sets of a file that are wanted, by name and keys, with their tasks read."""
    wanted = {
        name: section
        for name, section in file.explorer.evaluation.named().items()
        if is_wanted(name, section)
    }
    with ExitStack() as opened:
        reward = file.explorer.reward
        scorers = {"": scorer} if reward.functions else {"": scorer, reward.function: scorer}
        for function in dict.fromkeys(section.reward for section in wanted.values() if section.reward):
            if function not in scorers:
                scorers[function] = opened.enter_context(closing(open_reward(file, function)))
        yield tuple(
            _held_out(file, name, section, scorers[section.reward]) for name, section in wanted.items()
        )


def _held_out(file: JobFile, name: str, section: EvaluationSet, scorer: Scorer) -> HeldOut:
    explorer = file.explorer
    task_set = explorer.held_out_set(section.tasks, section.limit)
    tasks = open_tasks([task_set], file.directory)
    most = section.max_tokens or explorer.sampling.max_tokens
    measured = {
        "tasks": [tasks.digest, len(tasks)],
        "samples": section.samples,
        "temperature": section.temperature,
        "max_tokens": most,
        "reward": section.reward or explorer.reward.functions or explorer.reward.function,
        "correct": section.correct,
        "k": section.ks,
        "columns": asdict(Columns.of(task_set)),
        "agent": runner_of(explorer).measured_as,
    }
    digest = hasher()
    digest.update(json.dumps(measured, sort_keys=True).encode())
    return HeldOut(name, section, tasks, most, scorer, digest.hexdigest()[:_KEY])


def figures_of(section: EvaluationSet, outcomes: Sequence[TaskOutcome]) -> Mapping[str, float | None]:
    """Return the figures of a set, means over the tasks whose responses all have rewards; None without any."""
    scored = [outcome.rewards for outcome in outcomes if outcome.rewards]
    responses = sum(map(len, scored))
    means = [math.fsum(rewards) / len(rewards) for rewards in scored]
    figures = {
        "reward": _mean(means),
        "reward_stderr": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "truncated": sum(outcome.truncated for outcome in outcomes if outcome.rewards) / responses
        if responses
        else None,
    }
    for k in section.ks:
        if section.correct is not None:
            right = [sum(reward >= section.correct for reward in rewards) for rewards in scored]
            figures[pass_name(k)] = _mean(pass_at(section.samples, count, k) for count in right)
        if k > 1:
            figures[best_name(k)] = _mean(best_at(rewards, k) for rewards in scored)
    return figures


def pass_at(samples: int, correct: int, k: int) -> float:
    """Return the chance that of k responses, drawn without replacement from all of a task, one is correct.

    The unbiased estimate of pass@k (Chen et al., 2021, arXiv:2107.03374): 1 - C(n - c, k) / C(n, k), with c correct
    responses of n samples; k is at most n.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def best_at(rewards: Sequence[float], k: int) -> float:
    """Return the mean of the best reward of k responses over all choices of k of a task's responses.

    The i-th smallest of n rewards is the best of C(i - 1, k - 1) of the C(n, k) choices.
    """
    choices = math.comb(len(rewards), k)
    return math.fsum(math.comb(rank, k - 1) / choices * reward for rank, reward in enumerate(sorted(rewards)))


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None
