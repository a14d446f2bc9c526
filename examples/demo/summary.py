"""The result of a demo run, computed from what it left in the job directory."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import GREEDY, SAMPLED

from trainer.late_figures import late_curves
from trainer.monitors.jsonl import read_history

Document = Mapping[str, Any]

PARTS = ("noticed", "verify", "stage", "prepare", "load", "prove", "confirm")
"""Parts of the time from a version's publication until the engine has confirmed it."""

_PART = "reward/parts/"
_ENDS = 5
"""Steps at either end whose mean reward is shown."""

_SURE = 2.0
"""A rise counts if it is above this many standard errors of the difference."""


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """The reward on the held-out tasks before and after reinforcement.

    Args:
        before: Mean of the model that the job starts from.
        before_error: Its standard error over the tasks.
        after: Mean of the last version.
        after_error: Its standard error.
        step: The last version's step.
    """

    before: float
    before_error: float
    after: float
    after_error: float
    step: int

    @property
    def has_risen(self) -> bool:
        """Return whether the rise is beyond noise; taken as if the tasks of the two were drawn independently."""
        return self.after - self.before > _SURE * math.hypot(self.before_error, self.after_error)

    def __str__(self) -> str:
        ends = f"{self.before:.3f} +- {self.before_error:.3f} at the start"
        return f"{ends}, {self.after:.3f} +- {self.after_error:.3f} at version {self.step}"


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of one explorer.

    Args:
        applied: The versions that its engine confirmed, as (generation, step), in their order.
        differences: Of each version that it has proven, how far its answer was from the trainer's, in nats.
        latencies: Seconds from a version's publication until the engine confirmed it.
    """

    applied: Sequence[tuple[int, int]]
    differences: Sequence[float]
    latencies: Sequence[float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary that the demo prints at its end.

    Args:
        rewards: Mean reward of each training step.
        published: The versions, in their order.
        marker_to_version: Seconds of each.
        bytes_published: Of all of them.
        removed: How many steps each rule of retention removed.
        bytes_removed: Of these.
        explorers: By name.
        least_rise: By how much the reward must rise.
        parts: Means of each part of the reward, step by step.
        held_out: The reward on held-out tasks, by evaluation set.
    """

    rewards: Sequence[float]
    published: Sequence[tuple[int, int]]
    marker_to_version: Sequence[float]
    bytes_published: int
    removed: Mapping[str, int]
    bytes_removed: int
    explorers: Mapping[str, Explored]
    least_rise: float
    parts: Mapping[str, Sequence[float]]
    held_out: Mapping[str, HeldOutReward]

    @property
    def problems(self) -> list[str]:
        """Return the checks that failed; empty if all passed."""
        found = [] if list(self.published) == sorted(set(self.published)) else ["versions went back"]
        last = self.published[-1] if self.published else None
        for name, one in self.explorers.items():
            if list(one.applied) != sorted(set(one.applied)):
                found.append(f"{name} went back")
            if not one.applied or one.applied[-1] != last:
                found.append(f"{name} does not run the last version {last}")
            if len(one.differences) < len(one.applied):
                unproven = len(one.applied) - len(one.differences)
                found.append(f"{name} has not proven {unproven} of {len(one.applied)} versions")
        if len(self.rewards) < 2 * _ENDS or self.after <= self.before + self.least_rise:
            found.append(f"the reward did not rise by more than {self.least_rise:g}")
        for name, reward in self.held_out.items():
            if last is None or reward.step != last[1]:
                found.append(f"the last version was not measured by the set {name}")
            if not reward.has_risen:
                found.append(f"the held-out reward of the set {name} did not rise beyond noise")
        return found

    @property
    def before(self) -> float:
        """Return the mean reward of the first steps."""
        return _mean(self.rewards[:_ENDS])

    @property
    def after(self) -> float:
        """Return the mean reward of the last steps."""
        return _mean(self.rewards[-_ENDS:])


def summarize(job: Path, explorers: Mapping[str, Path], least_rise: float) -> Summary:
    """Return the summary of a finished run.

    Args:
        job: The job directory.
        explorers: The log of each explorer, by its name.
        least_rise: By how much the reward must rise.
    """
    history = read_history(str(job / "metrics.jsonl"))
    events = list(_lines(job / ".syncd" / "events.jsonl"))
    published = [event for event in events if event["event"] == "version_published"]
    removed = [event for event in events if event["event"] == "step_pruned"]
    return Summary(
        rewards=history.series("critic/score/mean")[1],
        published=[_pair(event) for event in published],
        marker_to_version=[event["latency"] for event in published if "latency" in event],
        bytes_published=sum(event["bytes"] for event in published),
        removed=Counter(event["rule"] for event in removed),
        bytes_removed=sum(event["bytes"] for event in removed),
        explorers={name: _explored(log) for name, log in explorers.items()},
        least_rise=least_rise,
        parts={
            name.removeprefix(_PART): history.series(name)[1]
            for name in sorted({one for step in history.steps.values() for one in step})
            if name.startswith(_PART)
        },
        held_out={name: _held_out(job, name) for name in (GREEDY, SAMPLED)},
    )


def report(summary: Summary) -> str:
    """Return the summary for people to read."""
    rules = ", ".join(f"{count} by {rule}" for rule, count in summary.removed.items())
    rows = [
        *((name, _ends(values)) for name, values in {"reward": summary.rewards, **summary.parts}.items()),
        *((f"held out, {name}", str(reward)) for name, reward in summary.held_out.items()),
        ("versions published", f"{len(summary.published)}, the last is {_label(summary.published[-1])}"),
        ("marker to version", _percentiles(summary.marker_to_version)),
        ("bytes published", f"{summary.bytes_published / 1e6:.1f} MB"),
        ("pruned", f"{sum(summary.removed.values())} steps, {summary.bytes_removed / 1e6:.1f} MB: {rules}"),
    ]
    for name, one in summary.explorers.items():
        last = _label(one.applied[-1]) if one.applied else "none"
        rows.append((f"explorer {name}", f"{len(one.applied)} versions applied, the last is {last}"))
        proven = f"{len(one.differences)} versions, {max(one.differences, default=0.0):.1e} nats off at most"
        rows.append(("  proven", proven))
        rows.append(("  version to engine", _percentiles(one.latencies)))
    return "\n".join(f"{name:<20} {text}" for name, text in rows)


def _held_out(job: Path, name: str) -> HeldOutReward:
    history = late_curves(str(job))
    steps, means = history.series(f"eval/{name}/reward")
    _, errors = history.series(f"eval/{name}/reward_stderr")
    return HeldOutReward(means[0], errors[0], means[-1], errors[-1], steps[-1])


def _ends(values: Sequence[float]) -> str:
    first, last = _mean(values[:_ENDS]), _mean(values[-_ENDS:])
    return f"{first:.3f} in the first {_ENDS} steps, {last:.3f} in the last {_ENDS}"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _explored(log: Path) -> Explored:
    lines = [line for line in _lines(log) if line.get("event") == "version_applied"]
    pairs = [_pair_of(line["version"]) for line in lines]
    differences = [line["mean"] for line in lines if line["proven"]]
    return Explored(pairs, differences, [sum(line[part] for part in PARTS if part in line) for line in lines])


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "nothing measured"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {statistics.median(ordered) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms"


def _lines(path: Path) -> Iterator[Document]:
    """Yield the JSON objects of a log; other lines are for people."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _pair(line: Document) -> tuple[int, int]:
    return line["generation"], line["step"]


def _pair_of(label: str) -> tuple[int, int]:
    generation, _, step = label.partition(".")
    return int(generation), int(step)


def _label(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
