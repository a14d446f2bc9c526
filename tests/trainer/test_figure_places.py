"""The figures that a user of agents asks for are in metrics.jsonl, in monitors, in the plot, and on the page."""

import math
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("matplotlib", reason="plots need matplotlib")
pytest.importorskip("tensorboard", reason="a monitor that can be read back")

from support.paths import ROOT

from syncd.dashboard.charts import ChartReader
from syncd.jsonl import append
from syncd.protocol.layout import Job
from trainer.config.model import JobConfig
from trainer.monitors.jsonl import read_history
from trainer.monitors.several import Monitors
from trainer.reporting.plot import draw

PLACES = {
    "perf/tokens_per_second": ("Tokens that are learnt", "Tokens that are learnt"),
    "perf/train_tokens_per_second": ("Tokens that are learnt", "Tokens that are learnt"),
    "timing_s/forward": ("Time of passes", "Time of passes"),
    "timing_s/backward": ("Time of passes", "Time of passes"),
    "timing_s/optimizer": ("Time of passes", "Time of passes"),
    "response/truncated": ("Groups and rollouts", "Groups and rollouts"),
    "reward/equal_groups": ("Groups and rollouts", "Groups and rollouts"),
    "reward/equal_groups_dropped": ("Groups and rollouts", "Groups and rollouts"),
    "reward/parts/NAME": ("Parts of the reward", "Parts of the reward"),
    "eval/reward": ("Reward", "Evaluation"),
    "eval/pass_at_K": ("Held-out tasks that are solved (pass@k)", "Evaluation"),
    "validation/loss": ("Loss", "Loss"),
    "tools/NAME/seconds": ("Time of a tool", "Time of a tool"),
    "tools/NAME/calls": ("Calls of a tool", "Calls of a tool"),
}
"""Of each figure, by the name that docs/engines.md or docs/monitors.md has: its panel, and its chart."""

VALUES = {figure: 1.0 + place / 8 for place, figure in enumerate(PLACES)}


def recorded(figure):
    return figure.replace("NAME", "add").replace("_K", "_4")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of one step that has all figures, a value of its own each."""
    directory = str(tmp_path_factory.mktemp("job"))
    document = {"job": {"dir": directory}, "model": {"path": "/m"}, "monitor": {"kinds": ["tensorboard"]}}
    monitors = Monitors.open(JobConfig.model_validate(document), 0)
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
    assert any(f"`{figure}`" in (ROOT / "docs" / page).read_text() for page in ("engines.md", "monitors.md"))


@pytest.mark.parametrize("figure", PLACES)
def test_it_is_in_a_monitor(job, figure):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{job}/monitors/tensorboard").Reload()
    assert [event.value for event in events.Scalars(recorded(figure))] == [pytest.approx(VALUES[figure])]


@pytest.mark.parametrize(("figure", "panel"), [(figure, panel) for figure, (panel, _) in PLACES.items()])
def test_it_is_in_the_plot(job, figure, panel):
    (axes,) = [each for each in draw([job]).axes if each.get_title(loc="left") == panel]
    drawn = [value for line in axes.lines for value in line.get_ydata()]
    assert any(math.isclose(value, VALUES[figure]) for value in drawn)


@pytest.mark.parametrize(("figure", "title"), [(figure, title) for figure, (_, title) in PLACES.items()])
def test_it_is_on_the_page(job, figure, title):
    (chart,) = [each for each in ChartReader(lambda: Job.at(job))()["charts"] if each["title"] == title]
    assert VALUES[figure] in [point[2] for series in chart["series"] for point in series["points"]]
