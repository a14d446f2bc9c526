"""Curves of one job or several as one picture; the table `syncd.figures.PANELS` says which.

    plot("/shared/job", "job.png")
    plot(["/shared/seed-1", "/shared/seed-2", "/shared/seed-3"], "seeds.svg")

matplotlib is imported when it is needed, without pyplot: no window, no global state.
"""

import itertools
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncd.errors import (
    ConfigError,
    JobMissingError,
    NotReadyError,
    UsageError,
    storage_errors,
)
from syncd.extras import install_command
from syncd.figures import METRICS, MOST_LINES, PANELS, Curve, Panel
from trainer.late_figures import late_curves
from trainer.monitors.jsonl import History, read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours of jobs in turn, distinct also for colour-blind people and in print."""

COLUMNS = 4  # panels beside each other
SIZE = (4.6, 2.5)  # inches of a panel

LineStyle = str | tuple[int, tuple[int, ...]]

_IN_TITLE = 50  # letters that fit into the line of the title, together with the labels of curves
_SAMPLE = 6  # letters that the sample of a line takes before its label

_STYLES: Sequence[LineStyle] = ("-", "--", "-.", ":", (0, (1, 3)), (0, (6, 3, 1, 3, 1, 3)))
"""Of the curves of a panel, in turn."""

_ERROR = "_stderr"  # how a metric ends that is the standard error of another one, which is drawn with bars
_DOTS_BELOW = 25  # points below which each is marked
_SMOOTH_FROM = 60  # steps from which on a curve also gets its moving mean


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    path: str
    colour: str
    history: History
    evaluations: History

    def source(self, panel: Panel) -> History:
        return self.evaluations if panel.of_versions else self.history


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A panel of which something is recorded: its curves, and the edges of its band."""

    panel: Panel
    curves: Sequence[Curve]
    band: Sequence[Curve]


def plot(job_dirs: Sequence[str] | str, out: str) -> str:
    """Draw the metrics.jsonl of jobs as .png, .svg, .pdf, or what else matplotlib writes; return its path."""
    _save(draw([job_dirs] if isinstance(job_dirs, str) else job_dirs), out)
    return out


def draw(job_dirs: Sequence[str]) -> "Figure":
    if not job_dirs:
        raise UsageError("nothing to plot", hint="name one job directory or more")
    histories = [_history(directory) for directory in job_dirs]
    evaluations = map(late_curves, job_dirs)
    paths = [_path(directory) for directory in job_dirs]
    parts = zip(_names(paths), paths, itertools.cycle(COLOURS), histories, evaluations, strict=False)
    return _figure([_Job(*each) for each in parts])


def _path(directory: str) -> str:
    """Return the path of a job as matplotlib shows it."""
    return _plain(os.fsencode(os.path.abspath(directory)).decode(errors="backslashreplace"))


def _plain(text: str) -> str:
    """Return what matplotlib shows as this text: it takes what is between two dollars for a formula."""
    return text.replace("$", r"\$")


def _names(paths: Sequence[str]) -> Sequence[str]:
    """Return what tells jobs apart: the names of their directories, or the paths where names repeat."""
    names = [os.path.basename(path) for path in paths]
    return names if len(set(names)) == len(names) else paths


def _history(directory: str) -> History:
    path = os.path.join(directory, METRICS)
    history = History()
    with storage_errors(path), suppress(FileNotFoundError):
        history = read_history(path)
    if not history.steps:
        if not os.path.isdir(directory):
            raise JobMissingError("the job directory is missing or not mounted", path=directory)
        raise NotReadyError(
            "no metrics yet", path=path, hint="the trainer writes them with its first step: trainer train"
        )
    return history


def _figure(jobs: Sequence[_Job]) -> "Figure":
    drawings = [drawing for panel in PANELS if (drawing := _drawing(panel, jobs)).curves]
    columns = min(COLUMNS, max(len(drawings), 1))
    rows = max(math.ceil(len(drawings) / columns), 1)
    figure = _new_figure((max(columns, 2) * SIZE[0], rows * SIZE[1] + 0.4))
    for number, drawing in enumerate(drawings, 1):
        _draw(figure.add_subplot(rows, columns, number), drawing, jobs)
    if not drawings:
        figure.text(0.5, 0.5, "no figure that is drawn was recorded", ha="center", color="0.4")
    if len(jobs) > 1:
        handles = [figure.axes[0].plot([], [], color=job.colour)[0] for job in jobs] if drawings else []
        figure.legend(
            handles, [job.name for job in jobs], loc="outside upper center", ncols=len(jobs), frameon=False
        )
    else:
        figure.suptitle(jobs[0].path, fontsize=12)
    ignored = sum(job.history.ignored for job in jobs)
    if ignored:
        note = f"lines of metrics.jsonl that could not be read: {ignored}"
        figure.text(0.995, 0.004, note, ha="right", fontsize=7, color="0.5")
    return figure


def _drawing(panel: Panel, jobs: Sequence[_Job]) -> _Drawing:
    curves = [curve for curve in panel.curves or _members(panel, jobs) if _is_recorded(curve, panel, jobs)]
    band = [curve for style in ("low", "high") for curve in curves if curve.style == style]
    return _Drawing(panel, [curve for curve in curves if curve not in band], band)


def _members(panel: Panel, jobs: Sequence[_Job]) -> list[Curve]:
    recorded = sorted({name for job in jobs for its in job.source(panel).steps.values() for name in its})
    matches = [(name, panel.family and panel.family.fullmatch(name)) for name in recorded]
    return [Curve(_plain(match[1]), (name,)) for name, match in matches if match][:MOST_LINES]


def _is_recorded(curve: Curve, panel: Panel, jobs: Sequence[_Job]) -> bool:
    values = (job.source(panel).series(*curve.names)[1] for job in jobs)
    return any(math.isfinite(value) for its in values for value in its)


def _new_figure(size: tuple[float, float]) -> "Figure":
    try:
        # Half a second, and an extra.
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib", hint=install_command("plot")) from error
    return Figure(figsize=size, dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))


def _draw(axes: "Axes", drawing: _Drawing, jobs: Sequence[_Job]) -> None:
    panel = drawing.panel
    styles = list(zip(drawing.curves, _STYLES, strict=False))
    for curve, style in styles:
        for job in jobs:
            _curve(axes, curve, style, job.source(panel), job.colour)
    with_band = len(drawing.band) > 1 and len(jobs) == 1
    if with_band:
        _band(axes, drawing.band, jobs[0])
    _dress(axes, panel)
    if with_band:
        low, high = drawing.band
        text = f"{drawing.curves[0].label}, and from {low.label} to {high.label}"
        axes.set_title(text, fontsize=8, loc="right", color="0.4")
    elif len(panel.curves) > 1 or panel.family:
        letters = len(panel.title) + sum(len(curve.label) + _SAMPLE for curve in drawing.curves)
        _key(axes, styles, inside=letters > _IN_TITLE)


def _dress(axes: "Axes", panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.from_zero:
        highest = float(axes.dataLim.y1)
        axes.set_ylim(0, 1.06 * highest if highest > 0 else 1)


def _key(axes: "Axes", styles: Sequence[tuple[Curve, LineStyle]], *, inside: bool) -> None:
    """Say which line is what: in the line of the title, where no curve can be, if there is room."""
    handles = [
        axes.plot([], [], linestyle=style, color="0.3", label=curve.label)[0] for curve, style in styles
    ]
    where: dict[str, Any] = {"loc": "best"}
    if not inside:
        where = {
            "loc": "lower right",
            "bbox_to_anchor": (1, 1),
            "borderaxespad": 0.2,
            "ncols": len(handles),
        }
    axes.legend(handles=handles, fontsize=8, frameon=False, **where)


def _curve(axes: "Axes", curve: Curve, line: LineStyle, history: History, colour: str) -> None:
    steps, values = history.series(*curve.names)
    style: dict[str, Any] = {"color": colour, "linestyle": line}
    if len(steps) < _DOTS_BELOW:
        style |= {"marker": "o", "markersize": 3}
    if len(steps) >= _SMOOTH_FROM:
        axes.plot(steps, values, linewidth=0.7, alpha=0.35, **style)
        values = _moving_mean(values, len(values) // 25)
    if steps:
        axes.plot(steps, values, linewidth=1.4, **style)
    errors = dict(zip(*history.series(f"{curve.names[0]}{_ERROR}"), strict=True))
    if errors:
        bars = [errors.get(step, math.nan) for step in steps]
        axes.errorbar(steps, values, bars, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)


def _band(axes: "Axes", edges: Sequence[Curve], job: _Job) -> None:
    """Fill the area between two metrics; those of several jobs would hide each other."""
    names = [curve.names[0] for curve in edges]
    figures = job.history.steps
    steps = [step for step, has in figures.items() if all(name in has for name in names)]
    low, high = ([figures[step][name] for step in steps] for name in names)
    axes.fill_between(steps, low, high, color=job.colour, alpha=0.12, linewidth=0)


def _moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours on both sides, gaps passed over."""
    windows = (values[max(at - reach, 0) : at + reach + 1] for at in range(len(values)))
    finite = ([value for value in window if math.isfinite(value)] for window in windows)
    return [math.fsum(window) / len(window) if window else math.nan for window in finite]


def _save(figure: "Figure", out: str) -> None:
    formats = sorted(figure.canvas.get_supported_filetypes())
    suffix = os.path.splitext(out)[1].lstrip(".").lower()
    if suffix not in formats:
        raise UsageError(
            f"a picture is not written as {suffix or 'a file without a suffix'!r}",
            path=out,
            hint=", ".join(formats),
        )
    with storage_errors(out), warnings.catch_warnings():
        # Of a name that matplotlib's font cannot spell, boxes are drawn.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(out)
