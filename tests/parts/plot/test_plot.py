"""Pictures of real metrics.jsonl files: what is in them, and what is said where there is nothing to draw."""

import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("matplotlib", reason="plots need matplotlib")

from syncd.errors import ConfigError, JobMissingError, NotReadyError, StorageError, UsageError
from syncd.extras import install_command
from syncd.jsonl import append
from trainer.cli.main import run
from trainer.monitors.base import MonitoredRun
from trainer.monitors.jsonl import Jsonl
from trainer.parts.evaluation.watch import EVERY, EvaluationWatch, evaluation_history
from trainer.parts.plot.plot import draw, plot

FULL = {
    "critic/score/mean": 0.5,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "response_length/mean": 30.0,
    "response_length/min": 10.0,
    "response_length/max": 50.0,
    "actor/pg_loss": 0.1,
    "actor/ppo_kl": 0.01,
    "experience/age_mean": 1.0,
    "experience/age_max": 3.0,
    "validation/loss": 0.3,
    "timing_s/sync_weight": 0.2,
    "timing_s/save_checkpoint": 2.0,
    "perf/tokens_per_second": 100.0,
    "perf/train_tokens_per_second": 200.0,
    "rollout_corr/ess_token": 0.9,
    "rollout_corr/ess_seq": 0.4,
    "reward/equal_groups": 0.25,
    "reward/equal_groups_dropped": 0.5,
    "response/truncated": 0.125,
    "reward/parts/format": 0.75,
    "timing_s/forward": 0.3,
    "timing_s/backward": 0.6,
    "timing_s/optimizer": 0.1,
    "tools/add/seconds": 1.5,
    "tools/add/calls": 2.5,
}


@pytest.fixture
def new_job(tmp_path):
    """Make a job whose metrics are given step by step."""

    def new(name, *lines):
        (tmp_path / name).mkdir(parents=True)
        monitor = Jsonl(MonitoredRun(str(tmp_path / name), "", "", "", {}, {}))
        for step, metrics in lines:
            monitor.log(metrics, step)
        return str(tmp_path / name)

    return new


def curves(figure, panel):
    """Return the points of each curve of a panel, legends' handles left out."""
    (axes,) = [each for each in figure.axes if each.get_title(loc="left") == panel]
    lines = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    return [line for line in lines if line]


def texts(figure):
    """Return what is written into a figure besides its title."""
    inside = [text for axes in figure.axes for text in axes.texts]
    beside = [text for text in figure.texts if text.get_text() != figure.get_suptitle()]
    return [text.get_text() for text in [*inside, *beside]]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_sets_the_format_of_the_picture(new_job, tmp_path, suffix, start):
    out = f"{tmp_path}/picture.{suffix}"
    assert plot(new_job("job", (1, FULL), (2, FULL)), out) == out
    with open(out, "rb") as file:
        assert file.read(len(start)) == start


@pytest.mark.parametrize("name", ["漢字", os.fsdecode(b"\xff")])
def test_a_job_whose_name_the_font_cannot_spell_is_drawn_without_a_warning(new_job, tmp_path, name):
    assert plot(new_job(name, (1, FULL)), f"{tmp_path}/picture.png")


def test_a_part_of_a_reward_may_have_the_name_of_a_formula(new_job, tmp_path):
    name = r"$\frac$"
    assert plot(new_job("job", (1, {f"reward/parts/{name}": 1.0})), f"{tmp_path}/picture.svg")
    (axes,) = draw([f"{tmp_path}/job"]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [name.replace("$", r"\$")]


def test_every_panel_shows_its_metrics(new_job):
    job = new_job("job", (1, FULL), (2, FULL | {"critic/score/mean": 0.7}))
    evaluated(job, "e0", (1, 2, 0.25, 4), of_set="math", pass_at_1=0.25, pass_at_4=0.75)
    figure = draw([job])
    assert figure.get_suptitle() == job
    assert curves(figure, "Reward") == [[(1, 0.5), (2, 0.7)]]
    assert curves(figure, "Evaluation") == [[(2, 0.25)], [(2, 0.75)], [(2, 0.25)]]
    assert curves(figure, "Loss") == [[(1, 0.1), (2, 0.1)], [(1, 0.3), (2, 0.3)]]
    assert curves(figure, "KL divergence") == [[(1, 0.01), (2, 0.01)]]
    assert curves(figure, "Age of trained experiences") == [[(1, 1.0), (2, 1.0)], [(1, 3.0), (2, 3.0)]]
    blocked = "Trainer blocked by a sync or save"
    assert curves(figure, blocked) == [[(1, 0.2), (2, 0.2)], [(1, 2.0), (2, 2.0)]]
    filled = {axes.get_title(loc="left") for axes in figure.axes if axes.collections}
    assert filled == {"Reward", "Response length"}
    legends = {axes.get_title(loc="left"): axes.get_legend() for axes in figure.axes}
    assert legends["Reward"] is None, "the band says what the curve is"
    passed = legends["Evaluation"].get_texts()
    assert [text.get_text() for text in passed] == ["math/pass_at_1", "math/pass_at_4", "math/reward"]
    assert curves(figure, "Trained tokens") == [[(1, 100.0), (2, 100.0)], [(1, 200.0), (2, 200.0)]]
    assert curves(figure, "Effective sample size") == [[(1, 0.9), (2, 0.9)], [(1, 0.4), (2, 0.4)]]
    shares = curves(figure, "Groups and rollouts")
    assert [values[0][1] for values in shares] == [0.25, 0.5, 0.125]
    assert curves(figure, "Time of a tool") == [[(1, 1.5), (2, 1.5)]]
    assert [text.get_text() for text in legends["Time of a tool"].get_texts()] == ["add"]
    assert curves(figure, "Calls of a tool") == [[(1, 2.5), (2, 2.5)]]
    assert curves(figure, "Parts of the reward") == [[(1, 0.75), (2, 0.75)]]
    assert [text.get_text() for text in legends["Parts of the reward"].get_texts()] == ["format"]
    passes = curves(figure, "Time of passes")
    assert [values[0][1] for values in passes] == [0.3, 0.6, 0.1]
    assert texts(figure) == []


def test_evaluations_are_drawn_at_the_steps_of_their_versions(new_job):
    job = new_job("job", (1, FULL), (8, FULL))
    evaluated(job, "e0", (1, 2, 0.25, 4), (1, 8, 0.75, 4), (2, 4, 0.5, 2), (2, 6, None, 0))
    evaluated(job, "e1", (2, 4, 0.8, 1))
    figure = draw([job])
    (training,), (evaluation,) = curves(figure, "Reward"), curves(figure, "Evaluation")
    assert training == [(1, 0.5), (8, 0.5)]
    assert evaluation == [(2, 0.25), (4, pytest.approx(0.6))], "step 8 was of an abandoned generation"
    (axes,) = [each for each in figure.axes if each.get_title(loc="left") == "Evaluation"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["reward"]


def test_an_evaluation_is_drawn_with_its_standard_error(new_job):
    job = new_job("job", (1, FULL), (8, FULL))
    evaluated(job, "e0", (1, 2, 0.25, 4), reward_stderr=0.125)
    evaluated(job, "e0", (1, 8, 0.5, 4))
    (axes,) = [each for each in draw([job]).axes if each.get_title(loc="left") == "Evaluation"]
    bars = [[tuple(point) for point in bar] for area in axes.collections for bar in area.get_segments()]
    assert [(2.0, 0.125), (2.0, 0.375)] in bars


def test_each_evaluation_is_told_once_in_the_order_of_versions(new_job):
    job, now = new_job("job"), [0.0]
    evaluated(job, "e0", (1, 1, 0.125, 8))
    watch = EvaluationWatch(job, lambda: now[0])
    assert watch.next_figures()["eval/step"] == 1.0
    evaluated(job, "e0", (1, 3, 0.5, 8), (1, 2, 0.25, 8))
    assert watch.next_figures() == {}, "it looks every few seconds"
    now[0] += EVERY
    told = [watch.next_figures() for _ in range(3)]
    assert told[0] == {"eval/step": 2.0, "eval/reward": 0.25, "eval/tasks": 8.0, "eval/failed": 1.0}
    assert [one.get("eval/step") for one in told] == [2.0, 3.0, None]
    with open(f"{job}/explorers/e0/evaluations.jsonl", "a") as file:
        file.write('{"generation": 1, "step": true, "reward": 9}\nnot json\n{"generation": 1, "st')
    now[0] += EVERY
    assert watch.next_figures() == {}


def evaluated(job, explorer, *versions, of_set="", **figures):
    """Append evaluations as `explorer run` writes them: generation, step, reward, tasks."""
    for generation, step, reward, tasks in versions:
        line = {
            "generation": generation,
            "step": step,
            "reward": reward,
            "tasks": tasks,
            "failed": 1,
            "at": 5.0,
        }
        line |= ({"set": of_set} if of_set else {}) | figures
        os.makedirs(f"{job}/explorers/{explorer}", exist_ok=True)
        append(f"{job}/explorers/{explorer}/evaluations.jsonl", [line])


def test_figures_of_sets_are_told_under_their_names_each_set_once(new_job):
    job, now = new_job("job"), [0.0]
    watch = EvaluationWatch(job, lambda: now[0])
    evaluated(job, "e0", (1, 2, 0.5, 4))
    now[0] += EVERY
    assert watch.next_figures()["eval/reward"] == 0.5
    evaluated(job, "e0", (1, 2, 0.25, 4), of_set="math", pass_at_4=0.75)
    evaluated(job, "e0", (1, 3, 0.125, 4))
    now[0] += EVERY
    assert watch.next_figures() == {
        "eval/step": 2.0,
        "eval/math/reward": 0.25,
        "eval/math/tasks": 4.0,
        "eval/math/failed": 1.0,
        "eval/math/pass_at_4": 0.75,
    }
    assert watch.next_figures()["eval/step"] == 3.0


def test_of_a_version_the_last_line_of_the_newest_settings_counts(new_job):
    job = new_job("job")
    evaluated(job, "e0", (1, 2, 0.1, 8), key="old", at=1.0)
    evaluated(job, "e0", (1, 2, 0.2, 8), (1, 2, 0.4, 6), key="new", at=2.0)
    evaluated(job, "e1", (1, 2, 0.8, 2), key="new", at=2.0)
    (means,) = evaluation_history(job).steps.values()
    assert (means["eval/reward"], means["eval/tasks"]) == (pytest.approx(0.5), 8.0), "(0.4 * 6 + 0.8 * 2) / 8"


def test_a_measured_step_takes_nothing_back_if_only_bench_measured_it(new_job):
    job = new_job("job")
    evaluated(job, "e0", (1, 2, 0.2, 4), (1, 4, 0.4, 4), (1, 6, 0.6, 4))
    evaluated(job, "bench", (2, 2, 0.1, 4), bench=True)
    assert evaluation_history(job).series("eval/reward") == ([2, 4, 6], [0.1, 0.4, 0.6])
    evaluated(job, "bench", (2, 6, 0.9, 4), bench=True)
    evaluated(job, "e0", (2, 4, 0.5, 4))
    assert evaluation_history(job).series("eval/reward") == ([2, 4, 6], [0.1, 0.5, 0.9])


def test_after_a_resume_the_curve_shows_the_latest_run_only(new_job):
    lines = [(step, {"critic/score/mean": 0.0}) for step in (1, 2, 3, 4)]
    lines += [(step, {"critic/score/mean": 1.0}) for step in (2, 3)]
    assert curves(draw([new_job("job", *lines)]), "Reward") == [[(1, 0.0), (2, 1.0), (3, 1.0)]]


def test_panels_of_which_nothing_was_recorded_are_left_out(new_job):
    figure = draw([new_job("job", (1, {"sft/loss": 2.0}), (2, {"sft/loss": 1.0}))])
    assert curves(figure, "Loss") == [[(1, 2.0), (2, 1.0)]]
    assert len(figure.axes) == 1
    assert texts(draw([new_job("none", (1, {"monitor/failures": 0.0}))])) == [
        "no figure that is drawn was recorded"
    ]


def test_a_file_of_an_earlier_release_is_drawn_under_the_present_names(new_job):
    """As tree 658d26ae wrote it; and with a resume by this one, whose lines have verl's names."""
    old = {
        "reward/mean": 0.25, "reward/min": 0.0, "reward/max": 1.0, "response/length_mean": 20.0,
        "response/tool_tokens_mean": 10.0, "critic/explained_variance": 0.5, "rollout/k3_kl": 0.125,
        "time/forward": 0.3,
    }  # fmt: skip
    figure = draw([new_job("job", (1, old), (2, old), (2, FULL))])
    assert curves(figure, "Reward") == [[(1, 0.25), (2, 0.5)]]
    assert curves(figure, "Response length") == [[(1, 30.0), (2, 30.0)]], "with the tokens of tools"
    assert curves(figure, "Explained variance of the critic") == [[(1, 0.5), (2, 0.5)]]
    assert curves(figure, "Policy mismatch") == [[(1, 0.125), (2, 0.125)]]
    assert curves(figure, "Time of passes")[0] == [(1, 0.3), (2, 0.3)]


def test_non_finite_values_are_gaps_and_a_curve_of_gaps_is_omitted(new_job):
    figure = draw(
        [new_job("job", (1, {"sft/loss": 2.0, "critic/score/mean": math.nan}), (2, {"sft/loss": math.inf}))]
    )
    ((first, second),) = curves(figure, "Loss")
    assert first == (1, 2.0)
    assert math.isnan(second[1])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss"]


def test_unreadable_lines_are_counted_in_the_picture(new_job):
    job = new_job("job", (1, FULL))
    with open(f"{job}/metrics.jsonl", "a") as file:
        file.write('[1]\n{"step":2,"metr')
    evaluated(job, "e0", (1, 1, 0.5, 4), pass_at_1=0.5)
    assert texts(draw([job])) == ["lines of metrics.jsonl that could not be read: 2"]


def test_long_curves_have_a_moving_average(new_job):
    job = new_job("job", *((step, {"critic/score/mean": float(step % 2)}) for step in range(200)))
    raw, mean = curves(draw([job]), "Reward")
    assert {value for _, value in raw} == {0.0, 1.0}
    assert all(0.4 < value < 0.6 for _, value in mean)


def test_several_jobs_differ_in_colour_and_legend(new_job):
    figure = draw([new_job(name, (1, FULL), (2, FULL)) for name in ("seed-1", "seed-2", "_$3")])
    colours = [line.get_color() for line in figure.axes[0].lines if len(line.get_xdata())]
    assert len(set(colours)) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["seed-1", "seed-2", r"_\$3"]
    assert not figure.axes[0].collections


def test_jobs_of_the_same_name_are_labelled_by_path(new_job):
    jobs = [new_job("a/job", (1, FULL)), new_job("b/job", (1, FULL))]
    assert [text.get_text() for text in draw(jobs).legends[0].get_texts()] == jobs


def test_plot_errors_have_exit_codes_and_hints(new_job, tmp_path, monkeypatch):
    empty, job = new_job("empty"), new_job("job", (1, FULL))
    with pytest.raises(NotReadyError, match="no metrics yet") as caught:
        plot([job, empty], f"{tmp_path}/out.png")
    assert (caught.value.exit_code, caught.value.path) == (3, f"{empty}/metrics.jsonl")
    with pytest.raises(JobMissingError):
        plot(f"{tmp_path}/nowhere", f"{tmp_path}/out.png")
    with pytest.raises(UsageError, match="'xyz'") as caught:
        plot(job, f"{tmp_path}/out.xyz")
    assert "png" in caught.value.hint
    with pytest.raises(UsageError):
        plot([], f"{tmp_path}/out.png")
    with pytest.raises(StorageError):
        plot(job, f"{tmp_path}/nowhere/out.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as caught:
        plot(job, f"{tmp_path}/out.png")
    assert caught.value.hint == install_command("plot")


def test_the_command_passes_its_arguments_on(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("trainer.parts.plot.plot.plot", lambda *given: (calls.append(given), "x.png")[1])
    assert run(["plot", "/job"]) == 0
    assert capsys.readouterr().out == "x.png\n"
    assert run(["plot", "/job", "-o", "y.png"]) == 0
    assert calls == [("/job", "/job/plot.png"), ("/job", "y.png")]


def test_matplotlib_is_imported_by_a_plot_alone():
    code = "import sys, trainer.parts.plot.plot; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "set()\n"
