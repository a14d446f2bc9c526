"""Charts of the page: bounded series that keep spikes, files that grow, are rotated, truncated or hold garbage."""

import json
import os

import pytest
from support.documents import checked

from syncd.errors import JobMissingError
from syncd.figures import METRICS, MOST_LINES
from syncd.jsonl import LINE_LIMIT
from syncd.observe.events import Event
from syncd.observe.journal import Journal
from syncd.parts.page.chart_table import CHARTS, EVENTS
from syncd.parts.page.charts import ChartReader, EventsCollector, MetricsCollector, answer, lanes_answer
from syncd.parts.page.lanes import MOST_KNOWN, MOST_LANES, MOST_SPANS
from syncd.parts.page.poller import PollResult
from syncd.parts.page.series import Point, ThinnedSeries
from syncd.parts.page.tail import GrowingFiles
from syncd.protocol.layout import Job
from trainer.monitors import jsonl
from trainer.monitors.jsonl import read_history


def points(series):
    return [(point.step, point.value) for point in series.points()]


def filled(values, most):
    series = ThinnedSeries(most)
    for step, value in enumerate(values):
        series.add(Point(1000.0 + step, step, value))
    return series


# --- series ---------------------------------------------------------------------------------------------------


def test_a_short_series_keeps_every_value():
    series = filled([3.0, 1.0, 2.0], 4)
    assert points(series) == [(0, 3.0), (1, 1.0), (2, 2.0)]
    assert series.per_group == 1


def test_a_long_series_keeps_the_extremes_of_each_group_and_the_newest_value():
    # Groups of four: 5 9 1 4 | 4 4 7 4 | 2 8 6 -; the last value is neither lowest nor highest of its group.
    series = filled([5.0, 9.0, 1.0, 4.0, 4.0, 4.0, 7.0, 4.0, 2.0, 8.0, 6.0], 4)
    assert series.per_group == 4
    assert points(series) == [(1, 9.0), (2, 1.0), (4, 4.0), (6, 7.0), (8, 2.0), (9, 8.0), (10, 6.0)]


def test_a_spike_among_many_values_stays_and_the_points_are_bounded():
    series = filled([0.5] * 5_000 + [99.0] + [0.5] * 5_000, 150)
    assert (5_000, 99.0) in points(series)
    assert len(points(series)) <= 3 * 150 + 1


def test_the_first_value_of_a_group_that_is_not_finite_stays():
    series = filled([1.0, None, 3.0, None, 2.0, 2.0, 2.0, 2.0, 2.0], 4)
    assert [step for step, value in points(series) if value is None] == [1]


def test_steps_that_a_resume_repeats_are_removed():
    series = filled([float(step) for step in range(8)], 100)
    series.drop_from(5)
    assert points(series) == [(step, float(step)) for step in range(5)]
    series.drop_from(0)
    assert series.points() == []
    thin = filled([float(step) for step in range(16)], 4)  # groups of four: 0-3, 4-7, 8-11, 12-15
    thin.drop_from(6)
    assert points(thin) == [(0, 0.0), (3, 3.0), (4, 4.0)], (
        "of a group on both sides the extreme before the step"
    )


# --- files ----------------------------------------------------------------------------------------------------


class Steps:
    def __init__(self):
        self.steps = []

    def add(self, document):
        self.steps.append(document["step"])


def lines(*steps):
    return "".join(f'{{"step":{step},"of":"{"x" * 300}"}}\n' for step in steps)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture
def files(path):
    return GrowingFiles([f"{path}", f"{path}.1", f"{path}.2"], Steps)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_each_line_is_read_once_and_only_when_it_is_ended(path, files):
    assert files.read(1 << 20) == 0
    append(path, lines(1, 2) + '{"st')
    files.read(1 << 20)
    append(path, 'ep":3}\n')
    files.read(1 << 20)
    assert files.collected.steps == [1, 2, 3]
    assert files.read(1 << 20) == 0
    assert (files.done, files.size, files.ignored) == (os.path.getsize(path), os.path.getsize(path), 0)


def test_one_reading_takes_a_bounded_number_of_bytes(path, files):
    append(path, lines(*range(10)))
    one = len(lines(0))
    assert files.read(2 * one) == 2 * one
    assert files.collected.steps == [0, 1]
    files.read(1 << 20)
    assert files.collected.steps == list(range(10))


def test_garbage_costs_its_own_lines_only(path, files):
    append(path, f'torn {{\n\n{lines(1)}[1]\n"{"y" * (2 * LINE_LIMIT)}"\n{lines(2)}')
    with open(path, "ab") as file:
        file.write(b"\xff\x00\n" + lines(3).encode())
    files.read(8 << 20)
    assert files.collected.steps == [1, 2, 3]
    assert files.ignored == 4


def test_lines_are_read_across_rotations(path, files):
    append(path, lines(1, 2))
    files.read(len(lines(1)))
    os.rename(path, f"{path}.1")
    append(path, lines(3))
    files.read(1 << 20)
    assert files.collected.steps == [1, 2, 3]
    append(path, lines(4))
    os.rename(f"{path}.1", f"{path}.2")
    os.rename(path, f"{path}.1")
    append(path, lines(5))
    files.read(1 << 20)
    assert files.collected.steps == [1, 2, 3, 4, 5]


def test_rotated_files_that_are_there_first_are_read_the_oldest_first(path, files):
    append(f"{path}.2", lines(1))
    append(f"{path}.1", lines(2))
    append(path, lines(3))
    files.read(1 << 20)
    assert files.collected.steps == [1, 2, 3]


@pytest.mark.parametrize("how", ["truncated", "rewritten in place", "replaced", "removed"])
def test_all_is_read_again_if_a_file_is_not_the_one_that_was_read(path, files, how):
    append(path, lines(1, 2))
    files.read(1 << 20)
    text = "" if how in ("truncated", "removed") else lines(7, 8, 9)
    if how == "replaced":
        append(f"{path}.new", text)
        os.rename(f"{path}.new", path)
    elif how == "removed":
        os.unlink(path)
    else:
        path.write_text(text)
    files.read(1 << 20)
    assert files.collected.steps == ([7, 8, 9] if text else [])


def test_a_link_or_a_fifo_is_not_read(path, files, tmp_path):
    (tmp_path / "secret").write_text(lines(1))
    os.symlink(tmp_path / "secret", path)
    with pytest.raises(OSError, match="symbolic links"):
        files.read(1 << 20)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        files.read(1 << 20)


# --- what the files say ---------------------------------------------------------------------------------------


def line(step, **metrics):
    time = f"2026-01-02T03:00:{step:02d}.500Z"
    return {
        "step": step,
        "time": time,
        "metrics": {name.replace("_", "/", 1): v for name, v in metrics.items()},
    }


AT = 1767322800.5
"""2026-01-02T03:00:00.5Z."""


def test_metrics_are_read_by_the_rule_of_their_file(tmp_path):
    written = [
        line(1, reward_mean=0.1, actor_pg_loss=2.0),
        line(2, reward_mean=0.2, actor_pg_loss=None),
        line(3, reward_mean=0.3),
        line(
            2, reward_mean=0.25
        ),  # a resume at step 2: step 3 is void, and so is what step 2 said of the reward
        line(3, actor_pg_loss=1.0),
        {"step": "4", "time": "2026-01-02T03:00:04Z", "metrics": {}},
        {"step": 4, "time": "yesterday", "metrics": {"critic/score/mean": 1.0}},
        {"step": 4, "metrics": {"critic/score/mean": 1.0}},
    ]
    collector = MetricsCollector()
    for each in written:
        collector.add(each)
    reward = collector.series["critic/score/mean",].points()
    assert reward == [(AT + 1, 1, 0.1), (AT + 2, 2, 0.25)]
    assert points(collector.series["actor/pg_loss",]) == [(1, 2.0), (2, None), (3, 1.0)]
    path = tmp_path / METRICS
    path.write_text("".join(f"{json.dumps(each)}\n" for each in written[:5]))
    steps, values = read_history(str(path)).series("critic/score/mean")
    assert [(step, value) for _, step, value in reward] == list(zip(steps, values, strict=True))


def test_each_metric_of_a_family_is_a_line_and_their_number_is_bounded(tmp_path):
    evaluated = {"eval/math/pass_at_1": 0.5, "eval/reward": 0.25, "eval/math/tasks": 9, "eval/step": 3}
    first = {f"reward/parts/p{number}": number for number in range(MOST_LINES)}
    written = [
        {**line(1), "metrics": {**first, "x" * 1000: 1.0}},
        {**line(2), "metrics": {"reward/parts/late": 1.0, "reward/parts/p0": 7.0, **evaluated}},
    ]
    append(tmp_path / METRICS, "".join(f"{json.dumps(each)}\n" for each in written))
    charts = {chart["name"]: chart for chart in ChartReader(lambda: Job.at(tmp_path))()["charts"]}
    shown = {
        name: {each["label"]: [value for _, _, value in each["points"]] for each in charts[name]["series"]}
        for name in ("parts", "evaluation")
    }
    assert shown["evaluation"] == {"math/pass_at_1": [0.5], "reward": [0.25]}
    assert list(shown["parts"]) == [f"p{number}" for number in range(MOST_LINES)]
    assert shown["parts"]["p0"] == [0.0, 7.0]
    assert (charts["parts"]["left_out"], charts["evaluation"]["left_out"]) == (1, 0)


def event(name, at, **fields):
    return {"event": name, "at": at, "level": "info", **fields}


def test_the_journal_gives_latency_saved_bytes_and_engines():
    collector = EventsCollector()
    for each in (
        event("leadership_acquired", 1.0, term=1),
        event("explorer_joined", 2.0, explorer="a", host="h"),
        event("explorer_joined", 2.5, explorer="b", host="h"),
        event("version_published", 3.0, step=1, latency=0.02, bytes=1000),
        event("version_published", 4.0, step=2, latency=0.03, changes_bytes=100, whole_bytes=1000),
        event("engine_state_changed", 5.0, explorer="a", state="wrong", before="proven"),
        event("version_published", 6.0, step=3, changes_bytes=300, whole_bytes=1000),
        event("engine_state_changed", 7.0, explorer="a", state="proven", before="wrong"),
        event("explorer_died", 8.0, explorer="b", silent_for=30.0),
        event("version_published", "soon", step=9, latency=1.0),
        event(["no name"], 9.0),
    ):
        collector.add(each)
    assert collector.series["latency",].points() == [(3.0, 1, 0.02), (4.0, 2, 0.03)]
    assert collector.series["saved",].points() == [(4.0, 2, 900.0), (6.0, 3, 1600.0)]
    alive = [(point.at, point.value) for point in collector.series["explorers",].points()]
    assert alive == [(2.0, 1.0), (2.5, 2.0), (5.0, 2.0), (7.0, 2.0), (8.0, 1.0)]
    assert [point.value for point in collector.series["trouble",].points()] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_explorers_that_left_while_no_daemon_ran_are_forgotten():
    collector = EventsCollector()
    for name in "ab":
        collector.add(event("explorer_joined", 1.0, explorer=name))
    collector.add(event("leadership_acquired", 100.0, term=2))
    collector.add(event("explorer_joined", 100.5, explorer="a"))
    assert collector.series["explorers",].last.value == 2.0, "the new leader may be about to report b"
    collector.add(event("explorer_joined", 120.0, explorer="c"))
    assert collector.series["explorers",].last.value == 2.0, "a and c"


def applied(at, *rows):
    return event("versions_applied", at, explorers=[list(row) for row in rows])


def test_the_journal_gives_what_each_explorer_ran_when():
    collector = EventsCollector()
    for each in (
        event("leadership_acquired", 1.0, term=1),
        applied(2.0, ("a", 1, 3, "proven"), ("b", None, None, None), ("c", 1, 2, "loaded")),
        applied(10.0, ("a", 1, 4, "proven"), ("b", 1, 4, None)),
        event("step_quarantined", 11.0, step=4, digest="x", reason="damaged"),
        event("explorer_died", 40.0, explorer="b", silent_for=30.0),
        event("explorer_left", 41.0, explorer="never-seen"),
        applied(50.0, ("b", 1, 4, None), "garbage", ("a", "x"), (7, 1, 2, None)),
        event("leadership_acquired", 60.0, term=2),
        applied(60.5, ("a", 1, 4, "proven"), ("b", 1, 3, None)),
        event("step_kept", 90.0, step=1, rule="leased"),
        event("daemon_stopped", 95.0),
    ):
        collector.add(each)
    found = collector.lanes.document()
    lanes = {lane["explorer"]: (lane["gone"], lane["spans"]) for lane in found["lanes"]}
    assert lanes["a"] == (None, [[2.0, 10.0, 1, 3, "proven"], [10.0, None, 1, 4, "proven"]]), (
        "told twice is one"
    )
    assert lanes["b"] == (
        None,
        [
            [2.0, 10.0, None, None, None],
            [10.0, 40.0, 1, 4, None],
            [50.0, 60.5, 1, 4, None],
            [60.5, None, 1, 3, None],
        ],
    )
    assert lanes["c"] == ("gone", [[2.0, 60.0, 1, 2, "loaded"]]), "the new leader does not report it"
    assert (found["quarantined"], found["until"], found["left_out"]) == ([4], 95.0, 0)


def passed(at, *rows):
    return event("versions_applied", at, explorers=[], recent=[list(row) for row in rows])


def test_a_lane_has_the_versions_that_ran_between_two_readings():
    collector = EventsCollector()
    for each in (
        applied(2.0, ("a", 1, 3, "proven")),
        passed(7.0, ("a", 1, 4, "proven", 3.0), ("a", 1, 5, "loaded", 9.0), ("a", 1, 6, "proven", 0.5)),
        applied(7.0, ("a", 1, 6, "proven")),
        passed(
            8.0, ("a", 1, 7, None, float("nan")), ("a", 1, 7, None, -1), ("a", 1, 7, None, 1e9), "?", ["a"]
        ),
        event("leadership_acquired", 60.0, term=2),
        passed(60.5, ("a", 1, 5, "loaded", 55.0), ("a", 1, 6, "proven", 54.0), ("a", 1, 8, "proven", 20.0)),
        applied(60.5, ("a", 1, 8, "proven")),
    ):
        collector.add(each)
    (lane,) = collector.lanes.document()["lanes"]
    assert lane["spans"] == [
        [2.0, 4.0, 1, 3, "proven"],
        [4.0, 4.0, 1, 4, "proven"],  # its clock is a little off: the order stays
        [4.0, 6.5, 1, 5, "loaded"],
        [6.5, 40.5, 1, 6, "proven"],  # the new leader repeats 5 and 6
        [40.5, None, 1, 8, "proven"],
    ]


def test_lanes_are_bounded():
    collector = EventsCollector()
    for number in range(MOST_KNOWN + 30):
        collector.add(
            applied(1.0 + number, *((f"e{number:04}", 1, step, None) for step in range(2 * MOST_SPANS)))
        )
    collector.add(event("explorer_died", 9999.0, explorer=f"e{MOST_KNOWN + 29:04}"))
    found = collector.lanes.document()
    assert len(found["lanes"]) == MOST_LANES
    assert found["left_out"] == MOST_KNOWN - MOST_LANES
    assert f"e{MOST_KNOWN + 29:04}" not in {lane["explorer"] for lane in found["lanes"]}, (
        "those that live come first"
    )
    assert {len(lane["spans"]) for lane in found["lanes"]} == {MOST_SPANS}
    assert found["lanes"][0]["spans"][-1][3] == 2 * MOST_SPANS - 1


def test_the_answer_is_from_the_files_of_the_job(tmp_path):
    job = Job.at(tmp_path)
    journal = Journal(job.events)
    os.makedirs(job.state)
    journal.observe(Event("leadership_acquired", "info", 1000.0, {"term": 1}))
    journal.observe(Event("explorer_joined", "info", 1001.0, {"explorer": "a", "host": "h"}))
    journal.observe(Event("step_kept", "info", 1030.0, {"step": 1, "rule": "leased"}))
    append(f"{job.root}/{METRICS}", json.dumps(line(1, reward_mean=float(10**400 > 1))) + "\n{torn\n")
    read = ChartReader(lambda: job)
    found = read()
    charts = {chart["name"]: chart for chart in found["charts"]}
    assert list(charts) == [chart.name for chart in CHARTS]
    assert charts["reward"]["series"][0] == {
        "label": "mean",
        "style": "line",
        "per_group": 1,
        "points": [[AT + 1, 1, 1.0]],
    }
    alive = charts["engines"]["series"][0]["points"]
    assert alive == [[1001.0, None, 1.0], [1030.0, None, 1.0]], "it holds until the newest event"
    assert [file["name"] for file in found["files"]] == [METRICS, EVENTS]
    assert [file["ignored"] for file in found["files"]] == [1, 0]
    os.rename(job.root, f"{job.root}-gone")
    with pytest.raises(JobMissingError):
        read()


def test_the_answers_are_as_documented(tmp_path):
    poll = PollResult(ChartReader(lambda: Job.at(tmp_path))())
    found = checked("/charts.json", answer(poll, 5.0))
    assert found["charts"][0]["series"]
    assert found["files"]
    checked("/lanes.json", lanes_answer(poll, 5.0))


def test_the_names_of_files_are_those_of_their_writers(tmp_path):
    assert METRICS == jsonl.METRICS
    assert os.path.basename(Job.at(tmp_path).events) == EVENTS
