"""The figures that a user of agents asks for are in metrics.jsonl, in monitors, in the plot, and on the page."""

import math
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("matplotlib", reason="plots need matplotlib")
pytest.importorskip("tensorboard", reason="a monitor that can be read back")

from support.paths import ROOT

from syncd.figures import METRICS, PANELS
from syncd.jobfile.model import JobFile
from syncd.jsonl import append
from syncd.parts.page.charts import ChartReader
from syncd.protocol.layout import Job
from trainer.monitors.jsonl import read_history
from trainer.monitors.several import Monitors
from trainer.parts.plot.plot import draw

OF_FAMILIES = {
    "evaluation": ("eval/reward", "eval/pass_at_K"),
    "parts": ("reward/parts/NAME",),
    "tools": ("tools/NAME/seconds",),
    "tool_calls": ("tools/NAME/calls",),
}

PLACES = {
    name: panel
    for panel in PANELS
    for name in (*OF_FAMILIES.get(panel.name, ()), *(name for curve in panel.curves for name in curve.names))
}
"""The panel of each figure, by the name that docs/metrics.md has."""

EDGES = {name for panel in PANELS for curve in panel.curves if curve.style != "line" for name in curve.names}

VALUES = {figure: 1.0 + place / 8 for place, figure in enumerate(PLACES)}


def recorded(figure):
    return figure.replace("NAME", "add").replace("_K", "_4")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of one step that has all figures, a value of its own each."""
    directory = str(tmp_path_factory.mktemp("job"))
    document = {"job": {"dir": directory}, "model": {"path": "/m"}, "monitor": {"kinds": ["tensorboard"]}}
    monitors = Monitors.open(JobFile.model_validate(document), 0)
    figures = {recorded(figure): value for figure, value in VALUES.items()}
    monitors.log(figures, 1)
    monitors.close(60.0)
    (Path(directory) / "explorers/e0").mkdir(parents=True)
    line = {name.removeprefix("eval/"): value for name, value in figures.items() if name.startswith("eval/")}
    append(f"{directory}/explorers/e0/evaluations.jsonl", [{"generation": 1, "step": 1} | line])
    return directory


@pytest.mark.parametrize("figure", PLACES)
def test_it_is_in_metrics_jsonl_and_documented(job, figure):
    assert read_history(f"{job}/metrics.jsonl").steps[1][recorded(figure)] == VALUES[figure]
    assert f"`{figure}`" in (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize("figure", PLACES)
def test_it_is_in_a_monitor(job, figure):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{job}/monitors/tensorboard").Reload()
    assert [event.value for event in events.Scalars(recorded(figure))] == [pytest.approx(VALUES[figure])]


@pytest.fixture(scope="module")
def picture(job):
    return draw([job])


@pytest.mark.parametrize("figure", PLACES)
def test_it_is_in_the_plot(picture, figure):
    title = PLACES[figure].title
    (axes,) = [each for each in picture.axes if each.get_title(loc="left") == title]
    drawn = [value for line in axes.lines for value in line.get_ydata()]
    filled = [y for area in axes.collections for path in area.get_paths() for _, y in path.vertices]
    assert any(math.isclose(value, VALUES[figure]) for value in (filled if figure in EDGES else drawn))


@pytest.mark.parametrize("figure", PLACES)
def test_it_is_on_the_page(job, figure):
    charts = ChartReader(lambda: Job.at(job))()["charts"]
    (chart,) = [each for each in charts if each["name"] == PLACES[figure].name]
    assert VALUES[figure] in [point[2] for series in chart["series"] for point in series["points"]]


def test_the_plot_and_the_page_have_the_same_panels_in_the_same_order(job, picture):
    charts = [each for each in ChartReader(lambda: Job.at(job))()["charts"] if each["source"] == METRICS]
    assert [each.get_title(loc="left") for each in picture.axes] == [each["title"] for each in charts]
