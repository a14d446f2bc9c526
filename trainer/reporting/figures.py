"""The metrics of a run that people see, as text; pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_SMOOTH = 0.2
"""Weight of the last step in the mean duration of a step."""

Fact = tuple[str, str]
"""A label and a value as text."""


@dataclass
class RunFigures:
    """The newest figures.

    Args:
        total: Steps of the run; None for no end.
        step: The last finished step.
        at: When it was finished: seconds on a monotonic clock.
        values: The newest value of each metric.
        pace: Mean seconds of a step, waits included; 0 before the first.
    """

    total: int | None
    step: int
    at: float
    values: dict[str, float] = field(default_factory=dict)
    pace: float = 0.0

    def take(self, metrics: Mapping[str, float], step: int, now: float) -> None:
        """Take the metrics of a step."""
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

    def tokens_a_second(self) -> float | None:
        """Return the tokens trained on in a second of a step."""
        tokens, seconds = self.values.get("train/tokens"), self.values.get("time/step", self.pace)
        return None if tokens is None or seconds <= 0 else tokens / seconds


def head(figures: RunFigures) -> list[Fact]:
    """Return how far it is."""
    of = "" if figures.total is None else f"/{figures.total}"
    left = figures.left()
    return [("step", f"{figures.step}{of}"), *([] if left is None else [("ETA", span(left))])]


def learning(figures: RunFigures) -> list[Fact]:
    """Return what is learnt."""
    return _present(
        ("reward", _reward(figures)),
        ("loss", _first(figures, "actor/pg_loss", "sft/loss")),
        ("kl", _first(figures, "actor/kl_loss", "actor/ppo_kl")),
        ("entropy", _first(figures, "actor/entropy")),
        ("grad", _first(figures, "actor/grad_norm")),
        ("length", _first(figures, "response/length_mean")),
    )


def speed(figures: RunFigures) -> list[Fact]:
    """Return what takes how long."""
    rate = figures.tokens_a_second()
    return _present(
        ("tokens/s", "" if rate is None else short(rate)),
        ("step", _seconds(figures, "time/step")),
        ("train", _seconds(figures, "time/train_step")),
        ("wait", _seconds(figures, "time/sample_wait")),
        ("sync", _seconds(figures, "time/sync_weight")),
        ("save", _seconds(figures, "time/save_checkpoint")),
    )


def traffic(figures: RunFigures) -> list[Fact]:
    """Return what goes out to explorers and what comes back."""
    return _present(
        ("version", _count(figures, "sync/step")),
        ("syncs", _count(figures, "sync/count")),
        ("saved", _count(figures, "save/step")),
        ("waiting", _count(figures, "experience/waiting")),
        ("age", _age(figures)),
    )


def trouble(figures: RunFigures) -> list[Fact]:
    """Return what went wrong, if anything did."""
    return _present(
        ("failed syncs", _positive(figures, "sync/failures")),
        ("dropped", _positive(figures, "experience/dropped")),
        ("rejected", _positive(figures, "experience/rejected")),
        ("monitor failures", _positive(figures, "monitor/failures")),
    )


def groups(figures: RunFigures) -> list[list[Fact]]:
    """Return all that belongs below the first line, what is not known left out."""
    return [group for group in (part(figures) for part in (learning, speed, traffic, trouble)) if group]


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


def _present(*facts: Fact) -> list[Fact]:
    return [fact for fact in facts if fact[1]]


def _first(figures: RunFigures, *names: str) -> str:
    return next((f"{figures.values[name]:.3g}" for name in names if name in figures.values), "")


def _reward(figures: RunFigures) -> str:
    mean, spread = (figures.values.get(f"reward/{name}") for name in ("mean", "std"))
    if mean is None:
        return ""
    return f"{mean:.3f}" if spread is None else f"{mean:.3f}±{spread:.2f}"


def _age(figures: RunFigures) -> str:
    mean, most = (figures.values.get(f"experience/age_{name}") for name in ("mean", "max"))
    if mean is None:
        return ""
    return f"{mean:.1f}" if most is None else f"{mean:.1f} (max {most:.0f})"


def _seconds(figures: RunFigures, name: str) -> str:
    value = figures.values.get(name)
    return "" if value is None else span(value)


def _count(figures: RunFigures, name: str) -> str:
    value = figures.values.get(name)
    return "" if value is None else f"{value:.0f}"


def _positive(figures: RunFigures, name: str) -> str:
    return _count(figures, name) if figures.values.get(name, 0) > 0 else ""
