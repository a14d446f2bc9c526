"""What the panels of a plot show, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a panel.

    Args:
        names: The metric; of several names the first that a step has.
        label: What it is called in the legend.
        style: Of the line, as matplotlib has it.
        band: The metrics between which the area is filled, if any.
    """

    names: tuple[str, ...]
    label: str = ""
    style: str = "-"
    band: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes.

    Args:
        title: What it shows.
        unit: Of its values.
        lines: Its curves.
        bands: What the filled areas are, where there are some.
        from_zero: Whether zero belongs in the picture.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    bands: str = ""
    from_zero: bool = False


REWARD = Panel(
    "Reward",
    "",
    (Line(("reward/mean",), band=("reward/min", "reward/max")),),
    bands="mean, and from min to max",
)
LOSS = Panel("Loss", "", (Line(("actor/pg_loss", "sft/loss")),))
KL = Panel("KL", "", (Line(("actor/kl_loss", "actor/ppo_kl")),))
AGE = Panel(
    "Age of experiences",
    "versions",
    (Line(("experience/age_mean",), band=("experience/age_mean", "experience/age_max")),),
    bands="mean, and up to max",
    from_zero=True,
)
TIMES = Panel(
    "Time of syncs and saves",
    "seconds",
    (Line(("time/sync_weight",), "sync"), Line(("time/save_checkpoint",), "save", "--")),
    from_zero=True,
)

PANELS = (REWARD, LOSS, KL, AGE, TIMES)
"""In the order of the figure's places."""
