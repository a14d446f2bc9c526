"""Metrics of one step: gathered pass by pass on each rank, then combined over all ranks."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from syncd.transports.ranks import Ranks
from trainer.engines.base import Metrics
from trainer.experience.batch import Batch
from trainer.experience.limits import MOST as LARGEST


@dataclass
class StepMetrics:
    # Sums, and for means the weighted sums. Names given at the start are 0 until something is added, so that
    # all steps have the same keys.
    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # for means, the sums of the weights
    tops: dict[str, float] = field(default_factory=dict)  # maxima

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str, value: float, weight: float) -> None:
        """Add to a mean over passes and ranks: `value` is the mean of `weight` tokens."""
        self.add(name, value * weight)
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def top(self, name: str, value: float) -> None:
        self.tops[name] = max(self.tops.get(name, value), value)

    def drop(self, *names: str) -> None:
        for name in names:
            for kept in (self.sums, self.weights, self.tops):
                kept.pop(name, None)

    def over(self, ranks: Ranks) -> Metrics:
        """Return the metrics over all ranks, the same on all of them."""
        whole = StepMetrics()
        for part in ranks.gather(self):
            for name, value in part.sums.items():
                whole.add(name, value)
            for name, weight in part.weights.items():
                whole.weights[name] = whole.weights.get(name, 0.0) + weight
            for name, value in part.tops.items():
                whole.top(name, value)
        means = {name: value / (whole.weights.get(name) or 1.0) for name, value in whole.sums.items()}
        return means | whole.tops | _spreads(means, whole.weights)


MISMATCH = (
    "rollout_corr/logprob_diff_mean",
    "rollout_corr/ratio_mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
)
"""Means over learnt tokens that say how far this model is from the policy that chose them."""

OF_ROLLOUTS = ("rollout_corr/ratio_seq_mean", "rollout_corr/chi2_seq")
"""The same of the products of ratios over whole rollouts."""

MOST_PARTS = 32  # parts of rewards that have a figure; of more, those of the first rollouts have one
MOST = 20.0  # the log of a ratio at most, as in verl: exp(20) is still a number that can be multiplied


def measure_difference(
    figures: StepMetrics, computed: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor
) -> None:
    """Record how far this model's log-probs are from those of explorers, at tokens that are learnt.

    With r = p(this model) / p(explorer) and tokens that the explorer has drawn: -log r and r - 1 - log r are
    estimates of KL(explorer || this model), Schulman's k1 and k3; r ** 2 - 1 is one of the chi-squared divergence of
    this model from the explorer.
    """
    apart = (computed.double() - recorded.double())[mask.bool()]
    if not len(apart):
        return
    ratio = apart.clamp(-MOST, MOST).exp()
    means = (apart.abs(), ratio, -apart, ratio - 1 - apart, ratio**2)
    for name, values in zip(MISMATCH, means, strict=True):
        figures.mean(name, float(values.mean()), len(apart))
    figures.top("rollout_corr/logprob_diff_max", float(apart.abs().max()))


def measure_rollouts(figures: StepMetrics, log_ratios: Sequence[float]) -> None:
    """Record the mean ratio of whole rollouts, and its square, from the sums of their log-ratios."""
    if log_ratios:
        ratio = torch.tensor(log_ratios, dtype=torch.float64).clamp(-MOST, MOST).exp()
        for name, values in zip(OF_ROLLOUTS, (ratio, ratio**2), strict=True):
            figures.mean(name, float(values.mean()), len(log_ratios))


def _spreads(sums: Mapping[str, float], weights: Mapping[str, float]) -> Metrics:
    """Return how much importance weights differ, of tokens and of rollouts, from the means of r and of r ** 2.

    chi2: mean(r ** 2) - 1, of which only the square was gathered: less 1, small squares would all be 0. ess: the
    effective sample size as a share, mean(r) ** 2 / mean(r ** 2), Kong 1992; 1 where all ratios are equal.
    """
    pairs = {"rollout_corr/ess_token": (MISMATCH[1], MISMATCH[4]), "rollout_corr/ess_seq": OF_ROLLOUTS}
    made: Metrics = {}
    for name, (ratio, chi2) in pairs.items():
        if ratio in sums:
            is_measured = weights.get(chi2, 0.0) > 0
            made[chi2] = sums[chi2] - 1 if is_measured else 0.0
            made[name] = sums[ratio] ** 2 / sums[chi2] if is_measured else 0.0
    return made


def spread_of(name: str, values: torch.Tensor | Sequence[float]) -> Metrics:
    """Return the mean and the extremes of values, by verl's names; not numbers if there are none."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    if not tensor.numel():
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), math.nan)
    return {
        f"{name}/mean": float(tensor.mean()),
        f"{name}/max": float(tensor.max()),
        f"{name}/min": float(tensor.min()),
    }


def learnt_values(rows: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(rows))[torch.cat(list(masks)).bool()].double()


def advantage_metrics(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> Metrics:
    return spread_of("critic/advantages", learnt_values(advantages, masks))


def value_metrics(
    values: Sequence[torch.Tensor], returns: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> Metrics:
    """Return how good values were, over the tokens that are learnt.

    The explained variance is 1 less the variance of what values missed, divided by that of the returns: 1 for exact
    values, 0 for a constant, and not a number where all returns are the same.
    """
    expected, returned = (learnt_values(rows, masks) for rows in (values, returns))
    missed, spread = (returned - expected).var(correction=0), returned.var(correction=0)
    return {
        **spread_of("critic/values", expected),
        **spread_of("critic/returns", returned),
        "critic/vf_explained_var": float(1 - missed / spread) if spread else math.nan,
    }


def batch_metrics(batch: Batch) -> Metrics:
    """Return metrics of rewards, prompts and responses, of rollouts over all their segments; zeros without rollouts.

    What explorers may say of a rollout (parts of its reward, whether it was cut off) is there if one has said it.
    """
    rewards = [row.reward for row in batch.firsts] or [0.0]
    chosen = sum(sum(row.action_mask) for row in batch.experiences)
    lengths = batch.over_rollouts([len(row.action_mask) for row in batch.experiences]) or [0]
    return {
        **spread_of("critic/score", rewards),
        "critic/score/std": statistics.pstdev(rewards),
        "reward/equal_groups": _equal_groups(batch),
        **spread_of("response_length", lengths),
        "response/tokens": float(chosen),
        "response/tool_tokens_mean": (sum(lengths) - chosen) / len(rewards),
        **spread_of("prompt_length", [row.prompt_length for row in batch.firsts] or [0]),
        **_equal_groups_dropped(batch),
        **_parts(batch),
        **_truncated(batch),
        **_tools(batch),
        **_teacher_metrics(batch),
    }


def _equal_groups(batch: Batch) -> float:
    """Return the share of groups in which all rollouts have the same reward, which teaches nothing to GRPO."""
    rewards: dict[int, set[float]] = {}
    for row, group in zip(batch.experiences, batch.groups, strict=True):
        rewards.setdefault(group, set()).add(row.reward)
    return sum(len(values) == 1 for values in rewards.values()) / max(len(rewards), 1)


def _equal_groups_dropped(batch: Batch) -> Metrics:
    """Return the share of groups that explorers dropped because all rewards were the same, if they say it."""
    said = [row.info.get("equal_dropped") for row in batch.firsts]
    counts = [float(count) for count in said if _is_number(count) and count >= 0]
    dropped = sum(counts)
    return {"reward/equal_groups_dropped": dropped / (dropped + len(counts))} if counts else {}


def _parts(batch: Batch) -> Metrics:
    """Return the means of the numbers in `info.score`, each over the rollouts that have it."""
    parts: dict[str, list[float]] = {}
    for row in batch.firsts:
        score = row.info.get("score")
        for name, value in score.items() if isinstance(score, Mapping) else ():
            if _is_number(value) and (name in parts or len(parts) < MOST_PARTS):
                parts.setdefault(name, []).append(float(value))
    return {f"reward/parts/{name}": statistics.fmean(values) for name, values in sorted(parts.items())}


def _truncated(batch: Batch) -> Metrics:
    """Return the share of rollouts that were cut off, of those of which explorers say it in `info.truncated`."""
    last = [row for row in batch.experiences if row.segment == row.segments - 1]
    flags = [row.info["truncated"] for row in last if isinstance(row.info.get("truncated"), bool)]
    return {"response/truncated": statistics.fmean(flags)} if flags else {}


def _tools(batch: Batch) -> Metrics:
    """Return of each tool that agents called its mean seconds and its calls a rollout, by what `info.tools` says."""
    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for row in batch.firsts:
        tools = row.info.get("tools")
        for name, pair in tools.items() if isinstance(tools, Mapping) else ():
            if _is_time(pair) and (name in counts or len(counts) < MOST_PARTS):
                counts[name] = counts.get(name, 0) + pair[0]
                seconds[name] = seconds.get(name, 0.0) + pair[1]
    means = {f"tools/{name}/seconds": seconds[name] / counts[name] for name in sorted(counts)}
    return means | {f"tools/{name}/calls": counts[name] / len(batch.firsts) for name in sorted(counts)}


def _is_time(pair: object) -> bool:
    """Return whether this is a number of calls, and the sum of their seconds."""
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2  # noqa: PLR2004 - count and seconds
        and all(map(_is_number, pair))
        and pair[0] > 0
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether what an explorer says is a number that can be added up: JSON has some that no float is."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def _teacher_metrics(batch: Batch) -> Metrics:
    """Return how far a teacher is from the policy that chose the tokens, none if it has read no learnt token.

    The mean of log p(policy) - log p(teacher) over tokens that the policy has drawn is an unbiased estimate of the
    KL divergence of the policy from the teacher for each token; one of few tokens may be below 0.
    """
    apart = [
        own - teacher
        for row in batch.experiences
        if row.teacher_logprobs is not None
        for own, teacher, learnt in zip(row.logprobs, row.teacher_logprobs, row.learnt, strict=True)
        if learnt
    ]
    if not apart:
        return {}
    return {
        "teacher/reverse_kl": statistics.fmean(apart),
        "teacher/logprob_diff_mean": statistics.fmean(map(abs, apart)),
        "teacher/tokens": float(len(apart)),
    }
