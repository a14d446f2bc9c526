"""The figures of a training run that people see: the panels of figures.toml, which page and `trainer plot` draw.

Metrics have verl's names where verl has the same quantity: docs/metrics.md says what each one is.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRICS = "metrics.jsonl"  # the trainer's figures in the job directory: docs/metrics.md
MOST_LINES = 6  # curves of a panel whose metrics are a family


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    names: tuple[str, ...]  # the metrics or fields that it shows; of several the first that a step has
    # line; step, a value that holds until the next one; low and high, the edges of a filled band.
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. Where nothing of it was recorded, it is left out."""

    name: str  # its stable name
    title: str  # its heading
    # Of its values, empty or one of seconds, bytes, GiB, tokens, versions, explorers, nats, share, a second.
    unit: str = ""
    curves: tuple[Curve, ...] = ()  # its curves; none if it has a family
    from_zero: bool = False  # whether zero belongs in the picture
    # Metrics that have a curve each, called by the group of the match; the first `MOST_LINES` are drawn.
    family: re.Pattern[str] | None = None
    # Whether its values are of versions: a plot draws them at the step of the version.
    of_versions: bool = False
    source: str = METRICS  # the file that it is from
    missing: str = ""  # what the page says while it has no value; empty if a job need not have any


def _read_panel(table: dict[str, Any]) -> Panel:
    """Return a panel of figures.toml; `mean_of` stands for a mean and the band between the extremes."""
    curves = tuple(Curve(label, (name,)) for label, name in table.pop("curves", {}).items())
    if mean := table.pop("mean_of", ""):
        band = (("mean", "mean", "line"), ("lowest", "min", "low"), ("highest", "max", "high"))
        curves = tuple(Curve(label, (f"{mean}/{end}",), style) for label, end, style in band)
    family = re.compile(table.pop("family")) if "family" in table else None
    return Panel(**table, curves=curves, family=family)


def _read_panels() -> tuple[Panel, ...]:
    with open(os.path.join(os.path.dirname(__file__), "figures.toml"), "rb") as file:
        return tuple(map(_read_panel, tomllib.load(file)["panel"]))


PANELS = _read_panels()  # the panels of the trainer's figures, in their order


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
    renamed = {RENAMED.get(name, name): value for name, value in metrics.items()}
    chosen, others = metrics.get(_LENGTH), metrics.get(_TOOLS)
    if isinstance(chosen, int | float) and isinstance(others, int | float):
        renamed[RENAMED[_LENGTH]] = chosen + others  # it did not count the tokens of tools
    return renamed
