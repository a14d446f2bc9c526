"""What a plot shows: its panels, and which figures each draws."""

from dataclasses import dataclass

LineStyle = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlotCurve:
    """A curve of a panel.

    Args:
        names: The metric; of several names the first that a step has. A name with `*` stands for all metrics that it
            matches, up to `MOST_MATCHES`: a curve for each, called by its name.
        label: What it is called in the legend; begins the labels of a name with `*`.
        style: Of the line, as matplotlib has it; those of a name with `*` differ.
        band: The metrics between which the area is filled, if any.
        of_versions: Whether it is of evaluations, by the step of the version.
    """

    names: tuple[str, ...]
    label: str = ""
    style: LineStyle = "-"
    band: tuple[str, str] | None = None
    of_versions: bool = False


@dataclass(frozen=True, slots=True)
class PlotPanel:
    """One set of axes.

    Args:
        title: Its title.
        unit: Of its values.
        lines: Its curves.
        bands: What the filled areas are, where there are some.
        from_zero: Whether zero belongs in the picture.
    """

    title: str
    unit: str
    lines: tuple[PlotCurve, ...]
    bands: str = ""
    from_zero: bool = False


REWARD = PlotPanel(
    "Reward",
    "",
    (
        PlotCurve(("reward/mean",), band=("reward/min", "reward/max")),
        PlotCurve(("eval/reward",), "evaluation", "--", of_versions=True),
        PlotCurve(("eval/*/reward",), "evaluation ", of_versions=True),
    ),
    bands="mean, and from min to max",
)
LOSS = PlotPanel(
    "Loss",
    "",
    (PlotCurve(("actor/pg_loss", "sft/loss")), PlotCurve(("validation/loss",), "validation", "--")),
)
KL = PlotPanel("KL", "", (PlotCurve(("actor/kl_loss", "actor/ppo_kl")),))
AGE = PlotPanel(
    "Age of experiences",
    "versions",
    (PlotCurve(("experience/age_mean",), band=("experience/age_mean", "experience/age_max")),),
    bands="mean, and up to max",
    from_zero=True,
)
TIMES = PlotPanel(
    "Time of syncs and saves",
    "seconds",
    (PlotCurve(("time/sync_weight",), "sync"), PlotCurve(("time/save_checkpoint",), "save", "--")),
    from_zero=True,
)

SPEED = PlotPanel(
    "Tokens that are learnt",
    "a second",
    (
        PlotCurve(("perf/tokens_per_second",), "with waits"),
        PlotCurve(("perf/train_tokens_per_second",), "in training", "--"),
    ),
    from_zero=True,
)
SIZES = PlotPanel(
    "Effective sample size",
    "share",
    (PlotCurve(("rollout/ess_token",), "tokens"), PlotCurve(("rollout/ess_seq",), "rollouts", "--")),
    from_zero=True,
)
SHARES = PlotPanel(
    "Groups and rollouts",
    "share",
    (
        PlotCurve(("reward/equal_groups",), "equal"),
        PlotCurve(("reward/equal_groups_dropped",), "dropped", ":"),
        PlotCurve(("response/truncated",), "cut off", "--"),
    ),
    from_zero=True,
)

PASSES = PlotPanel(
    "Held-out tasks that are solved (pass@k)",
    "share",
    (PlotCurve(("eval/*pass_at_*",), of_versions=True),),
    from_zero=True,
)

STEP = PlotPanel(
    "Time of passes",
    "seconds",
    (
        PlotCurve(("time/forward",), "forward"),
        PlotCurve(("time/backward",), "backward", "--"),
        PlotCurve(("time/optimizer",), "optimizer", ":"),
    ),
    from_zero=True,
)
PARTS = PlotPanel("Parts of the reward", "", (PlotCurve(("reward/parts/*",)),))

TOOLS = PlotPanel("Time of a tool", "seconds", (PlotCurve(("tools/*/seconds",)),), from_zero=True)
CALLS = PlotPanel("Calls of a tool", "a rollout", (PlotCurve(("tools/*/calls",)),), from_zero=True)

LARGE = (REWARD, LOSS, SPEED)
"""The panels that have a place of the figure each, the first ones."""

HALVES = ((PARTS, PASSES), (STEP, TIMES), (KL, AGE), (TOOLS, CALLS), (SIZES, SHARES))
"""Those that share the places that follow, one above the other."""

PANELS = (*LARGE, *(panel for pair in HALVES for panel in pair))
"""In the order of the figure's places."""
