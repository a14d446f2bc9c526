"""The figures of a training run that people see: one table of panels, which the page and `trainer plot` both draw.

Metrics have verl's names where verl has the same quantity: docs/engines.md and docs/monitors.md say what each one is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRICS = "metrics.jsonl"
"""The trainer's figures in the job directory: docs/monitors.md."""

MOST_LINES = 6
"""Curves of a panel whose metrics are a family."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a panel.

    Args:
        label: What it is called.
        names: The metrics or fields that it shows; of several the first that a step has.
        style: line; step, a value that holds until the next one; low and high, the edges of a filled band.
    """

    label: str
    names: tuple[str, ...]
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. Where nothing of it was recorded, it is left out.

    Args:
        name: Its stable name.
        title: Its heading.
        unit: Of its values, empty or one of seconds, bytes, GiB, tokens, versions, explorers, nats, share, a second.
        curves: Its curves; none if it has a family.
        from_zero: Whether zero belongs in the picture.
        family: Metrics that have a curve each, called by the group of the match; the first `MOST_LINES` are drawn.
        of_versions: Whether its values are of versions: a plot draws them at the step of the version.
        source: The file that it is from.
        missing: What the page says while it has no value; empty if a job need not have any.
    """

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...] = ()
    from_zero: bool = False
    family: re.Pattern[str] | None = None
    of_versions: bool = False
    source: str = METRICS
    missing: str = ""


def _mean(name: str) -> tuple[Curve, ...]:
    """Return the curve of a mean, and the band between the extremes."""
    return (
        Curve("mean", (f"{name}/mean",)),
        Curve("lowest", (f"{name}/min",), "low"),
        Curve("highest", (f"{name}/max",), "high"),
    )


def _line(label: str, *names: str) -> Curve:
    return Curve(label, names)


PANELS = (
    Panel("reward", "Reward", "", _mean("critic/score")),
    Panel(
        "evaluation",
        "Evaluation",
        "",
        family=re.compile("eval/((?:.+/)?(?:reward|[a-z]+_at_[0-9]+))"),
        of_versions=True,
    ),
    Panel(
        "loss",
        "Loss",
        "",
        (
            _line("policy", "actor/pg_loss"),
            _line("examples", "sft/loss"),
            _line("validation", "validation/loss"),
        ),
        missing="Not recorded by the trainer yet",
    ),
    Panel(
        "kl",
        "KL divergence",
        "nats",
        (
            _line("from the start model", "actor/kl_loss"),
            _line("of the updates", "actor/ppo_kl"),
            _line("in the reward", "actor/reward_kl_penalty"),
            _line("from the teacher", "teacher/reverse_kl"),
        ),
    ),
    Panel("entropy", "Entropy", "nats", (_line("policy", "actor/entropy"),)),
    Panel(
        "grad_norm",
        "Gradient norm",
        "",
        (_line("policy", "actor/grad_norm"), _line("critic", "critic/grad_norm")),
        from_zero=True,
    ),
    Panel(
        "clipped",
        "Clipped tokens",
        "share",
        (_line("policy", "actor/pg_clipfrac"), _line("critic", "critic/vf_clipfrac")),
        from_zero=True,
    ),
    Panel("response_length", "Response length", "tokens", _mean("response_length"), from_zero=True),
    Panel("prompt_length", "Prompt length", "tokens", _mean("prompt_length"), from_zero=True),
    Panel("advantages", "Advantages", "", _mean("critic/advantages")),
    Panel("value_loss", "Loss of the critic", "", (_line("loss", "critic/vf_loss"),), from_zero=True),
    Panel(
        "explained", "Explained variance of the critic", "", (_line("explained", "critic/vf_explained_var"),)
    ),
    Panel(
        "values",
        "Values and returns",
        "",
        (_line("values", "critic/values/mean"), _line("returns", "critic/returns/mean")),
    ),
    Panel(
        "rate",
        "Learning rate",
        "",
        (_line("policy", "actor/lr"), _line("critic", "critic/lr")),
        from_zero=True,
    ),
    Panel("parts", "Parts of the reward", "", family=re.compile("reward/parts/(.+)")),
    Panel(
        "shares",
        "Groups and rollouts",
        "share",
        (
            _line("equal groups", "reward/equal_groups"),
            _line("dropped as equal", "reward/equal_groups_dropped"),
            _line("cut off", "response/truncated"),
        ),
        from_zero=True,
    ),
    Panel(
        "mismatch",
        "Policy mismatch",
        "nats",
        (
            _line("k3", "rollout_corr/k3_kl"),
            _line("mean difference", "rollout_corr/logprob_diff_mean"),
        ),
        from_zero=True,
    ),
    Panel(
        "sample_size",
        "Effective sample size",
        "share",
        (_line("tokens", "rollout_corr/ess_token"), _line("rollouts", "rollout_corr/ess_seq")),
        from_zero=True,
    ),
    Panel(
        "staleness",
        "Age of trained experiences",
        "versions",
        (_line("mean", "experience/age_mean"), _line("oldest", "experience/age_max")),
        from_zero=True,
    ),
    Panel(
        "speed",
        "Tokens that are learnt",
        "a second",
        (
            _line("with waits", "perf/tokens_per_second"),
            _line("in training", "perf/train_tokens_per_second"),
        ),
        from_zero=True,
    ),
    Panel(
        "step_time",
        "Time of a step",
        "seconds",
        (
            _line("whole", "timing_s/step"),
            _line("training", "timing_s/train_step"),
            _line("waiting", "timing_s/sample_wait"),
        ),
        from_zero=True,
    ),
    Panel(
        "passes",
        "Time of passes",
        "seconds",
        (
            _line("forward", "timing_s/forward"),
            _line("backward", "timing_s/backward"),
            _line("optimizer", "timing_s/optimizer"),
        ),
        from_zero=True,
    ),
    Panel(
        "sync",
        "Trainer blocked by a sync or save",
        "seconds",
        (_line("sync", "timing_s/sync_weight"), _line("save", "timing_s/save_checkpoint")),
        from_zero=True,
    ),
    Panel(
        "mfu",
        "Model FLOPs utilization",
        "share",
        (_line("policy", "perf/mfu/actor"), _line("critic", "perf/mfu/critic")),
        from_zero=True,
    ),
    Panel(
        "gpu_memory",
        "GPU memory, most so far",
        "GiB",
        (
            _line("allocated", "perf/max_memory_allocated_gb"),
            _line("reserved", "perf/max_memory_reserved_gb"),
        ),
        from_zero=True,
    ),
    Panel("host_memory", "Memory in use", "GiB", (_line("host", "perf/cpu_memory_used_gb"),), from_zero=True),
    Panel("tools", "Time of a tool", "seconds", from_zero=True, family=re.compile("tools/(.+)/seconds")),
    Panel(
        "tool_calls", "Calls of a tool", "a rollout", from_zero=True, family=re.compile("tools/(.+)/calls")
    ),
)
"""The panels of the trainer's figures, in their order."""


# --- names of earlier releases --------------------------------------------------------------------------------

_TIMES = "step train_step sample_wait sample sync_weight save_checkpoint save_blocked validation probe"
_PASSES = "forward backward optimizer critic critic_forward critic_backward critic_optimizer"
_RATIOS = "kl k3_kl chi2_token chi2_seq logprob_diff_mean logprob_diff_max"
_WEIGHTS = "ratio_mean ratio_seq_mean ess_token ess_seq"

RENAMED: Mapping[str, str] = {
    **{f"reward/{name}": f"critic/score/{name}" for name in ("mean", "std", "max", "min")},
    **{f"time/{name}": f"timing_s/{name}" for name in f"{_TIMES} {_PASSES}".split()},
    **{f"rollout/{name}": f"rollout_corr/{name}" for name in f"{_RATIOS} {_WEIGHTS}".split()},
    "time/old_logprobs": "timing_s/old_log_prob",
    "time/reference": "timing_s/ref",
    "rollout/is_weight_mean": "rollout_corr/rollout_is_mean",
    "rollout/is_out_of_bounds": "rollout_corr/rollout_is_oob_ratio",
    "response/length_mean": "response_length/mean",
    "critic/value_mean": "critic/values/mean",
    "critic/return_mean": "critic/returns/mean",
    "critic/explained_variance": "critic/vf_explained_var",
}
"""What a metric is called now, by the name that earlier releases wrote."""

_LENGTH, _TOOLS = "response/length_mean", "response/tool_tokens_mean"


def by_present_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a line, which an earlier release may have written, by their present names."""
    found = {RENAMED.get(name, name): value for name, value in metrics.items()}
    chosen, others = metrics.get(_LENGTH), metrics.get(_TOOLS)
    if isinstance(chosen, int | float) and isinstance(others, int | float):
        found[RENAMED[_LENGTH]] = chosen + others  # it did not count the tokens of tools
    return found
