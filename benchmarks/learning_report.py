"""What `learning.py` makes of its runs: figures of a run, the targets, the table, the picture."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from trainer.monitors.jsonl import read_history

ON_POLICY, ASYNC, PPO, LORA = "on-policy", "async", "ppo + critic", "lora"

MARGIN = 0.15
"""By this the mean reward must rise in every seed: on-policy, with a critic, and with an adapter."""

NOISE = 0.05
"""The asynchronous mean over the seeds may differ by this, or by two standard errors if that is more."""

FIRST, LAST = 5, 15
"""Steps whose mean is the reward at the start, and at the end."""

_RISING = {ON_POLICY: "on-policy", PPO: "PPO with a critic", LORA: "with an adapter"}
"""The runs with a target for the rise of their reward, and what the table calls them."""

COLOURS = {ON_POLICY: "#0072b2", ASYNC: "#d55e00", PPO: "#009e73", LORA: "#cc79a7"}

Figures = dict[str, Any]
"""Of one run: steps, rewards, ages (mean, in versions) and largest age by step, accuracies by version."""

Found = Mapping[int, Mapping[str, Figures]]
"""Figures by seed and style."""


class WeightDirectory(NamedTuple):
    """One of the targets."""

    what: str
    measured: str
    asked: str
    met: bool


def figures_of(job: Path, accuracies: Sequence[Path], steps: int) -> Figures:
    """Return the figures of a run that has ended.

    Args:
        job: Its job directory.
        accuracies: What its explorers measured: the greedy accuracy on held-out problems of each version.
        steps: Steps it should have.

    Raises:
        ValueError: Steps are missing.
    """
    history = read_history(f"{job}/metrics.jsonl")
    found, rewards = history.series("critic/score/mean")
    if found != list(range(1, steps + 1)):
        raise ValueError(f"{job}/metrics.jsonl has {len(found)} of {steps} steps")
    return {
        "steps": steps,
        "rewards": rewards,
        "ages": history.series("experience/age_mean")[1],
        "age_max": max(history.series("experience/age_max")[1]),
        "accuracy": sorted(_accuracies(accuracies).items()),
    }


def _accuracies(paths: Sequence[Path]) -> dict[int, float]:
    """Return accuracies by step; explorers that measured the same version found the same."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {line["step"]: line["accuracy"] for line in lines}


def start_of(figures: Figures) -> float:
    """Return the mean reward of the first steps."""
    return statistics.fmean(figures["rewards"][:FIRST])


def end_of(figures: Figures) -> float:
    """Return the mean reward of the last steps."""
    return statistics.fmean(figures["rewards"][-LAST:])


def rise_of(figures: Figures) -> float:
    """Return by how much the mean reward has risen."""
    return end_of(figures) - start_of(figures)


def noise_of(differences: Sequence[float]) -> float:
    """Return by how much a mean of paired differences may be off zero."""
    if len(differences) == 1:
        return NOISE
    return max(NOISE, 2 * statistics.stdev(differences) / math.sqrt(len(differences)))


def targets(found: Found) -> list[WeightDirectory]:
    """Return the targets of the runs that are there, fixed before the first run of each, and whether they are met."""
    oldest = max(runs[ON_POLICY]["age_max"] for runs in found.values())
    first, *rises = [_rise_target(what, found, name) for name, what in _RISING.items() if _has(found, name)]
    return [
        first,
        *(_async_targets(found) if _has(found, ASYNC) else []),
        WeightDirectory("oldest rollout, on-policy, versions", f"{oldest:.0f}", "0", oldest == 0),
        *rises,
    ]


def _has(found: Found, name: str) -> bool:
    return all(name in runs for runs in found.values())


def _rise_target(what: str, found: Found, name: str) -> WeightDirectory:
    rise = min(rise_of(runs[name]) for runs in found.values())
    text = f"least rise of the reward, {what}"
    return WeightDirectory(text, f"{rise:+.3f}", f">= {MARGIN:+.2f}", rise >= MARGIN)


def _async_targets(found: Found) -> list[WeightDirectory]:
    differences = [end_of(runs[ASYNC]) - end_of(runs[ON_POLICY]) for runs in found.values()]
    difference, noise = statistics.fmean(differences), noise_of(differences)
    age = min(statistics.fmean(runs[ASYNC]["ages"]) for runs in found.values())
    return [
        WeightDirectory(
            "async less on-policy, at the end",
            f"{difference:+.3f}",
            f"within {noise:.3f}",
            abs(difference) <= noise,
        ),
        WeightDirectory("mean age of rollouts, async, versions", f"{age:.2f}", "> 0", age > 0),
    ]


def report(found: Found, rollouts: int) -> str:
    """Return both tables as Markdown; a target that is not met says MISSED.

    Args:
        found: The figures.
        rollouts: Rollouts of a step.
    """
    lines = [
        f"Mean reward of the first {FIRST} and the last {LAST} steps, {rollouts} rollouts each.",
        "",
        "| seed | run | start | end | rise | held out, greedy: start / end | mean age | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(seed, name, run) for seed, runs in found.items() for name, run in runs.items()]
    lines += ["", "| target | measured | asked |  |", "|---|---|---|---|"]
    for target in targets(found):
        verdict = "met" if target.met else "MISSED"
        lines.append(f"| {target.what} | {target.measured} | {target.asked} | {verdict} |")
    return "\n".join(lines)


def _row(seed: int, name: str, run: Figures) -> str:
    start, end = start_of(run), end_of(run)
    held = [accuracy for _, accuracy in run["accuracy"]]
    return (
        f"| {seed} | {name} | {start:.3f} | {end:.3f} | {end - start:+.3f} | {held[0]:.2f} / {held[-1]:.2f} "
        f"| {statistics.fmean(run['ages']):.2f} | {run['seconds']:.0f} |"
    )


def draw(found: Found, path: Path) -> None:
    """Draw the rewards of all runs, and of each style the mean over the seeds."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    rewards, accuracy = figure.subplots(1, 2)
    every = [*next(iter(found.values()))]
    for name, colour in ((name, COLOURS[name]) for name in every):
        curves = [_smooth(runs[name]["rewards"]) for runs in found.values()]
        for curve in curves:
            rewards.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=1)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        rewards.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=2.2, label=name)
        for runs in found.values():
            steps, values = zip(*runs[name]["accuracy"], strict=True)
            accuracy.plot(steps, values, color=colour, alpha=0.5, linewidth=1)
    rewards.set(title=f"Mean reward of rollouts, {len(found)} seeds", xlabel="step", ylim=(0, 1))
    accuracy.set(title="Greedy accuracy on held-out problems", xlabel="version", ylim=(0, 1))
    rewards.legend(loc="lower right")
    for axes in (rewards, accuracy):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Return the mean of the last values at each place."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
