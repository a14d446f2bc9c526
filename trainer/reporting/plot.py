"""Curves of one job or several as one picture; `trainer.reporting.plot_panels` says which.

    plot("/shared/job", "job.png")
    plot(["/shared/seed-1", "/shared/seed-2", "/shared/seed-3"], "seeds.svg")

matplotlib is imported when it is needed, without pyplot: no window, no global state.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from syncd.errors import (
    ConfigError,
    JobMissingError,
    NotReadyError,
    UsageError,
    storage_errors,
)
from syncd.extras import install_command
from trainer.monitors.jsonl import METRICS, History, read_history
from trainer.reporting.evaluations import evaluation_history
from trainer.reporting.plot_panels import HALVES, LARGE, PANELS, LineStyle, PlotCurve, PlotPanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours of jobs in turn, distinct also for colour-blind people and in print."""

SIZE = (20.0, 7.5)
"""Inches."""

MOST_MATCHES = 6
"""Curves of a name with `*`."""

_EVERYWHERE = re.compile("^(eval|tools|reward/parts)/|/(reward|seconds|calls)$")
"""What names of a panel with `*` all have, and labels need not say."""

_IN_TITLE = 58
"""Letters that fit into the line of the title, together with the labels of curves."""

_SAMPLE = 6
"""Letters that the sample of a line takes before its label."""

_STYLES: Sequence[LineStyle] = ("-", "--", "-.", ":", (0, (1, 3)), (0, (6, 3, 1, 3, 1, 3)))
_DOTS_BELOW = 25
"""Points below which each is marked."""

_SMOOTH_FROM = 60
"""Steps from which on a curve also gets its moving mean."""


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    colour: str
    history: History
    evaluations: History

    def source(self, line: PlotCurve) -> History:
        """Return where a curve is recorded."""
        return self.evaluations if line.of_versions else self.history


def plot(job_dirs: Sequence[str] | str, out: str) -> str:
    """Draw what the metrics.jsonl of jobs say, and return the path of the picture.

    Args:
        job_dirs: One job directory, or several to compare.
        out: The picture: .png, .svg, .pdf, or what else matplotlib writes.

    Raises:
        NotReadyError: A job has no metrics yet.
        ConfigError: matplotlib is not installed.
        UsageError: The picture's suffix is none that matplotlib knows, or there is no job.
        StorageError: A file cannot be read, or the picture not be written.
    """
    _save(draw([job_dirs] if isinstance(job_dirs, str) else job_dirs), out)
    return out


def draw(job_dirs: Sequence[str]) -> "Figure":
    """Return the figure of jobs; errors as of `plot`."""
    if not job_dirs:
        raise UsageError("nothing to plot", hint="name one job directory or more")
    histories = [_history(directory) for directory in job_dirs]
    evaluations = map(evaluation_history, job_dirs)
    parts = zip(_names(job_dirs), itertools.cycle(COLOURS), histories, evaluations, strict=False)
    return _figure([_Job(*each) for each in parts])


def _names(directories: Sequence[str]) -> list[str]:
    """Return what tells jobs apart: the names of their directories, or the paths where names repeat."""
    paths = [os.path.abspath(directory).replace("$", r"\$") for directory in directories]
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
    figure = _new_figure()
    for axes, panel in zip(_axes(figure), PANELS, strict=True):
        _draw(axes, panel, jobs)
    if len(jobs) > 1:
        handles = [figure.axes[0].plot([], [], color=job.colour)[0] for job in jobs]
        figure.legend(
            handles, [job.name for job in jobs], loc="outside upper center", ncols=len(jobs), frameon=False
        )
    else:
        figure.suptitle(jobs[0].name, fontsize=12)
    ignored = sum(job.history.ignored for job in jobs)
    if ignored:
        note = f"lines of metrics.jsonl that could not be read: {ignored}"
        figure.text(0.995, 0.004, note, ha="right", fontsize=7, color="0.5")
    return figure


def _new_figure() -> "Figure":
    try:
        # Half a second, and an extra.
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib", hint=install_command("plot")) from error
    return Figure(figsize=SIZE, dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def _axes(figure: "Figure") -> "Iterator[Axes]":
    """Yield the axes of the panels, which share the steps."""
    columns = (len(LARGE) + len(HALVES)) // 2
    grid = figure.add_gridspec(2, columns)
    places = (grid[number] for number in range(2 * columns))
    first = figure.add_subplot(next(places))
    yield first
    for place in itertools.islice(places, len(LARGE) - 1):
        yield figure.add_subplot(place, sharex=first)
    for place in places:
        halves = place.subgridspec(2, 1)
        yield figure.add_subplot(halves[0], sharex=first)
        yield figure.add_subplot(halves[1], sharex=first)


def _draw(axes: "Axes", panel: PlotPanel, jobs: Sequence[_Job]) -> None:
    drawn = []
    for line in _expanded(panel, jobs):
        found = [_curve(axes, line, job) for job in jobs]
        drawn += [line] if any(found) else []
    if panel.bands and len(jobs) == 1:
        _bands(axes, panel, jobs[0])
    _dress(axes, panel)
    if not drawn:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", color="0.6", transform=axes.transAxes)
    else:
        letters = len(panel.title) + sum(len(line.label) + _SAMPLE for line in drawn if line.label)
        _key(axes, drawn, inside=bool(panel.bands) or letters > _IN_TITLE)


def _expanded(panel: PlotPanel, jobs: Sequence[_Job]) -> Iterator[PlotCurve]:
    """Yield the curves of a panel, those of a name with `*` one by one."""
    for line in panel.lines:
        if not any("*" in name for name in line.names):
            yield line
            continue
        recorded = {name for job in jobs for its in job.source(line).steps.values() for name in its}
        found = sorted(name for name in recorded if fnmatchcase(name, line.names[0]))[:MOST_MATCHES]
        for name, style in zip(found, _STYLES, strict=False):
            label = line.label + _EVERYWHERE.sub("", name)
            yield replace(line, names=(name,), label=label, style=style)


def _dress(axes: "Axes", panel: PlotPanel) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.from_zero:
        axes.set_ylim(bottom=0)


def _key(axes: "Axes", lines: Sequence[PlotCurve], *, inside: bool) -> None:
    """Say which line is what: in the line of the title, where no curve can be, unless bands are explained there."""
    named = [line for line in lines if line.label]
    handles = [axes.plot([], [], linestyle=line.style, color="0.3", label=line.label)[0] for line in named]
    where: dict[str, Any] = {"loc": "lower right"}
    if not inside:
        where |= {"bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "ncols": max(len(handles), 1)}
    if handles:
        axes.legend(handles=handles, fontsize=8, frameon=False, **where)


def _curve(axes: "Axes", line: PlotCurve, job: _Job) -> bool:
    """Draw a curve, and say whether there was one."""
    steps, values = job.source(line).series(*line.names)
    if not any(map(math.isfinite, values)):
        return False
    style: dict[str, Any] = {"color": job.colour, "linestyle": line.style}
    if len(steps) < _DOTS_BELOW:
        style |= {"marker": "o", "markersize": 3}
    if len(steps) >= _SMOOTH_FROM:
        axes.plot(steps, values, linewidth=0.7, alpha=0.35, **style)
        values = _moving_mean(values, len(values) // 25)
    axes.plot(steps, values, linewidth=1.4, **style)
    return True


def _bands(axes: "Axes", panel: PlotPanel, job: _Job) -> None:
    """Fill the areas, where they are recorded; those of several jobs would hide each other."""
    filled = [_band(axes, line.band, job) for line in panel.lines if line.band is not None]
    if any(filled):
        axes.set_title(panel.bands, fontsize=8, loc="right", color="0.4")


def _band(axes: "Axes", names: tuple[str, str], job: _Job) -> bool:
    figures = job.history.steps
    steps = [step for step, has in figures.items() if all(name in has for name in names)]
    low, high = ([figures[step][name] for step in steps] for name in names)
    axes.fill_between(steps, low, high, color=job.colour, alpha=0.12, linewidth=0)
    return bool(steps)


def _moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours on both sides, gaps passed over."""
    windows = (values[max(at - reach, 0) : at + reach + 1] for at in range(len(values)))
    finite = ([value for value in window if math.isfinite(value)] for window in windows)
    return [math.fsum(window) / len(window) if window else math.nan for window in finite]


def _save(figure: "Figure", out: str) -> None:
    known = sorted(figure.canvas.get_supported_filetypes())
    suffix = os.path.splitext(out)[1].lstrip(".").lower()
    if suffix not in known:
        raise UsageError(
            f"a picture is not written as {suffix or 'a file without a suffix'!r}",
            path=out,
            hint=", ".join(known),
        )
    with storage_errors(out):
        figure.savefig(out)
