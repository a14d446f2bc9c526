"""Which charts the page has, and from which figures of which file each line is. docs/dashboard.md lists them."""

import re
from dataclasses import dataclass

METRICS = "metrics.jsonl"
"""The trainer's figures in the job directory: docs/monitors.md."""

EVENTS = "events.jsonl"
"""The daemon's journal: docs/events.md."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart.

    Args:
        label: What it is called.
        sources: The metrics or fields that it shows; of several the first that a line has.
        style: line; step, a value that holds until the next one; low and high, the edges of a filled band.
    """

    label: str
    sources: tuple[str, ...]
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """One set of axes.

    Args:
        name: Its stable name.
        title: Its heading.
        unit: Of its values: empty, versions, seconds, bytes, explorers, nats, share, a rollout or a second.
        source: The file that it is from.
        curves: Its lines; none if it has a family.
        missing: Why there may be no value; empty if a job need not have any.
        from_zero: Whether zero belongs in the picture.
        family: Metrics that have a line each, called by the group of the match; the first `MOST_LINES` are drawn.
    """

    name: str
    title: str
    unit: str
    source: str
    curves: tuple[Curve, ...]
    missing: str = ""
    from_zero: bool = False
    family: re.Pattern[str] | None = None


MOST_LINES = 6
"""Lines of a chart whose metrics are a family."""

_NOT_YET = "Not recorded by the trainer yet"

CHARTS = (
    Chart(
        "reward",
        "Reward",
        "",
        METRICS,
        (
            Curve("mean", ("reward/mean",)),
            Curve("lowest", ("reward/min",), "low"),
            Curve("highest", ("reward/max",), "high"),
        ),
        _NOT_YET,
    ),
    Chart("parts", "Parts of the reward", "", METRICS, (), family=re.compile("reward/parts/(.+)")),
    Chart(
        "evaluation",
        "Evaluation",
        "",
        METRICS,
        (),
        family=re.compile("eval/((?:.+/)?(?:reward|[a-z]+_at_[0-9]+))"),
    ),
    Chart(
        "loss",
        "Loss",
        "",
        METRICS,
        (Curve("loss", ("actor/pg_loss", "sft/loss")), Curve("validation", ("validation/loss",))),
        _NOT_YET,
    ),
    Chart(
        "shares",
        "Groups and rollouts",
        "share",
        METRICS,
        (
            Curve("equal groups", ("reward/equal_groups",)),
            Curve("dropped as equal", ("reward/equal_groups_dropped",)),
            Curve("cut off", ("response/truncated",)),
        ),
        from_zero=True,
    ),
    Chart(
        "tools",
        "Time of a tool",
        "seconds",
        METRICS,
        (),
        from_zero=True,
        family=re.compile("tools/(.+)/seconds"),
    ),
    Chart(
        "tool_calls",
        "Calls of a tool",
        "a rollout",
        METRICS,
        (),
        from_zero=True,
        family=re.compile("tools/(.+)/calls"),
    ),
    Chart(
        "mismatch",
        "Policy mismatch",
        "nats",
        METRICS,
        (Curve("k3", ("rollout/k3_kl",)), Curve("mean difference", ("rollout/logprob_diff_mean",))),
        from_zero=True,
    ),
    Chart(
        "sample_size",
        "Effective sample size",
        "share",
        METRICS,
        (Curve("tokens", ("rollout/ess_token",)), Curve("rollouts", ("rollout/ess_seq",))),
        from_zero=True,
    ),
    Chart(
        "speed",
        "Tokens that are learnt",
        "a second",
        METRICS,
        (
            Curve("with waits", ("perf/tokens_per_second",)),
            Curve("in training", ("perf/train_tokens_per_second",)),
        ),
        from_zero=True,
    ),
    Chart(
        "passes",
        "Time of passes",
        "seconds",
        METRICS,
        (
            Curve("forward", ("time/forward",)),
            Curve("backward", ("time/backward",)),
            Curve("optimizer", ("time/optimizer",)),
        ),
        from_zero=True,
    ),
    Chart(
        "staleness",
        "Age of trained experiences",
        "versions",
        METRICS,
        (Curve("mean", ("experience/age_mean",)), Curve("oldest", ("experience/age_max",))),
        _NOT_YET,
        from_zero=True,
    ),
    Chart(
        "sync",
        "Trainer blocked by a sync",
        "seconds",
        METRICS,
        (Curve("blocked", ("time/sync_weight",)),),
        _NOT_YET,
        from_zero=True,
    ),
    Chart(
        "latency",
        "From marker to version",
        "seconds",
        EVENTS,
        (Curve("latency", ("latency",)),),
        "Not recorded by the daemon yet",
        from_zero=True,
    ),
    Chart(
        "saved",
        "Saved by deltas, in all",
        "bytes",
        EVENTS,
        (Curve("saved", ("saved",), "step"),),
        "No version has changes of a parent yet",
        from_zero=True,
    ),
    Chart(
        "engines",
        "Explorers and engines in trouble",
        "explorers",
        EVENTS,
        (Curve("explorers", ("explorers",), "step"), Curve("in trouble", ("trouble",), "step")),
        "No explorer was seen yet",
        from_zero=True,
    ),
)
"""The charts in the order of the page."""
