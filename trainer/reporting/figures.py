"""The metrics of a run that people see, as text; pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_SMOOTH = 0.2  # weight of the last step in the mean duration of a step
Fact = tuple[str, str]  # a label and a value as text


@dataclass
class RunFigures:
    total: int | None  # steps of the run; None for no end
    step: int  # the last finished step
    at: float  # when it was finished: seconds on a monotonic clock
    values: dict[str, float] = field(default_factory=dict)  # the newest value of each metric
    pace: float = 0.0  # mean seconds of a step, waits included; 0 before the first

    def update(self, metrics: Mapping[str, float], step: int, now: float) -> None:
        self.values.update(metrics)
        if step <= self.step:
            return
        each = (now - self.at) / (step - self.step)
        self.pace = each if self.pace == 0 else self.pace + _SMOOTH * (each - self.pace)
        self.step, self.at = step, now

    def left(self) -> float | None:
        """Return the seconds to go, None where nobody can say."""
        if self.total is None or self.pace == 0:
            return None
        return max(self.total - self.step, 0) * self.pace


Show = Callable[[RunFigures], str]  # returns a fact as text, empty if it is not known


def head(figures: RunFigures) -> list[Fact]:
    of = "" if figures.total is None else f"/{figures.total}"
    left = figures.left()
    return [("step", f"{figures.step}{of}"), *([] if left is None else [("ETA", span(left))])]


def groups(figures: RunFigures) -> list[list[Fact]]:
    """Return all that belongs below the first line, what is not known left out."""
    shown = ([(label, text) for label, show in group if (text := show(figures))] for group in _GROUPS)
    return [group for group in shown if group]


def short(value: float) -> str:
    """Return a count in at most five characters or so: 950, 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def span(seconds: float) -> str:
    """Return a duration as a person says it: 0.12s, 4.2s, 3:07, 1:02:03, 3d 04:05."""
    if seconds < 59.95:  # noqa: PLR2004 -- what would not be said as 60.0s
        return f"{seconds:.2g}s" if seconds < 1 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _reward(figures: RunFigures) -> str:
    mean, spread = (figures.values.get(f"critic/score/{name}") for name in ("mean", "std"))
    if mean is None:
        return ""
    return f"{mean:.3f}" if spread is None else f"{mean:.3f}±{spread:.2f}"


def _age(figures: RunFigures) -> str:
    mean, most = (figures.values.get(f"experience/age_{name}") for name in ("mean", "max"))
    if mean is None:
        return ""
    return f"{mean:.1f}" if most is None else f"{mean:.1f} (max {most:.0f})"


def _first(show: Callable[[float], str], *names: str) -> Show:
    return lambda figures: next((show(figures.values[name]) for name in names if name in figures.values), "")


def _positive(value: float) -> str:
    return f"{value:.0f}" if value > 0 else ""


_NUMBER, _COUNT = "{:.3g}".format, "{:.0f}".format

_GROUPS: Sequence[Sequence[tuple[str, Show]]] = (
    (  # what is learnt
        ("reward", _reward),
        ("evaluation", _first("{:.3f}".format, "eval/reward")),
        ("loss", _first(_NUMBER, "actor/pg_loss", "sft/loss")),
        ("kl", _first(_NUMBER, "actor/kl_loss", "actor/ppo_kl")),
        ("entropy", _first(_NUMBER, "actor/entropy")),
        ("grad", _first(_NUMBER, "actor/grad_norm")),
        ("clipped", _first(_NUMBER, "actor/pg_clipfrac")),
        ("value loss", _first(_NUMBER, "critic/vf_loss")),
        ("explained", _first(_NUMBER, "critic/vf_explained_var")),
        ("length", _first(_NUMBER, "response_length/mean")),
    ),
    (  # what takes how long
        ("tokens/s", _first(short, "perf/tokens_per_second")),
        ("step", _first(span, "timing_s/step")),
        ("train", _first(span, "timing_s/train_step")),
        ("wait", _first(span, "timing_s/sample_wait")),
        ("sync", _first(span, "timing_s/sync_weight")),
        ("save", _first(span, "timing_s/save_checkpoint")),
    ),
    (  # what goes out to explorers and what comes back
        ("version", _first(_COUNT, "sync/step")),
        ("saved", _first(_COUNT, "save/step")),
        ("waiting", _first(_COUNT, "experience/waiting")),
        ("age", _age),
    ),
    (  # what went wrong, if anything did
        ("failed syncs", _first(_positive, "sync/failures")),
        ("dropped", _first(_positive, "experience/dropped")),
        ("rejected", _first(_positive, "experience/rejected")),
        ("monitor failures", _first(_positive, "monitor/failures")),
    ),
)
"""The lines below the first one: each fact's label and what shows it."""
