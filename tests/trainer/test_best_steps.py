"""The best steps by a figure are pinned and kept, and a run that finds no better one ends."""

import json
import os
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.trainers import make_trainer, prepared_trainer, small_config, write_experiences

from syncd.errors import CorruptDataError
from syncd.jobfile.trainer_sections import SelectionSection
from syncd.jsonl import append
from syncd.protocol.job_end import read_end
from syncd.protocol.layout import Job
from syncd.protocol.request import Pin, read_pins, write_pin
from syncd.synchronizer import Synchronizer
from trainer.best_steps import Selection
from trainer.checkpoints import read_state
from trainer.launch.daemon import start_daemon
from trainer.parts.evaluation.watch import EVERY, EvaluationWatch


@pytest.fixture
def job(tmp_path):
    with Synchronizer.open(str(tmp_path), "trainer") as sync:
        yield sync.job


def selection(job, **keys):
    return Selection(SelectionSection(metric="validation/loss", goal="min", **keys), job)


def seal(job, *steps):
    for step in steps:
        os.makedirs(job.step(step), exist_ok=True)


def told(its, *values):
    for step, value in values:
        its.observe({"validation/loss": value}, step)
        its.keep()


def pinned(job):
    return sorted(read_pins(job))


def test_the_best_steps_that_are_there_are_pinned(job):
    its = selection(job, keep_best=2)
    told(its, (1, 5.0), (2, 4.0))
    assert pinned(job) == [], "neither is sealed"
    seal(job, 1, 3)
    told(its, (3, 3.0))
    assert pinned(job) == [1, 3], "2 was never written"
    seal(job, 5)
    told(its, (4, 1.0), (5, 4.0))
    assert pinned(job) == [3, 5]
    seal(job, 6)
    told(its, (6, 4.0), (7, float("nan")))
    assert pinned(job) == [3, 5], "of equal values the older stays"


def test_evaluations_are_of_the_step_that_they_name(job):
    its = Selection(SelectionSection(metric="eval/reward"), job)
    seal(job, 2, 4)
    its.observe({"eval/step": 2.0, "eval/reward": 0.5}, 9)
    its.observe({"eval/step": 4.0, "eval/reward": 0.25}, 12)
    its.observe({"critic/score/mean": 1.0}, 13)
    its.keep()
    assert pinned(job) == [2]
    assert "eval/reward 0.5" in read_pins(job)[2].reason


def test_a_figure_of_a_set_keeps_steps_and_ends_the_run_whenever_other_sets_are_found(job, tmp_path):
    now = [0.0]
    watch = EvaluationWatch(job.root, lambda: now[0])
    its = Selection(SelectionSection(metric="eval/math/pass_at_4", patience=2), job)
    seal(job, 2, 4, 6)
    os.makedirs(f"{job.root}/explorers/e0")
    for of_set, step, value in (
        ("", 2, 0.9),
        ("math", 2, 0.5),
        ("math", 4, 0.25),
        ("", 6, 0.9),
        ("math", 6, 0.5),
    ):
        line = {"generation": 1, "step": step, "set": of_set, "reward": value, "pass_at_4": value}
        with open(f"{job.root}/explorers/e0/evaluations.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        assert not its.over
        now[0] += EVERY
        its.observe(watch.next_figures(), step + 3)
        its.keep()
        assert pinned(job) == ([2] if of_set or step > 2 else [])
    assert its.over == "eval/math/pass_at_4 no better than 0.5 for 2 values"


def test_a_pin_of_a_person_stays(job):
    seal(job, 1, 2)
    write_pin(job, Pin(1, "for the paper", 1.0))
    its = selection(job)
    told(its, (1, 1.0), (2, 0.5))
    assert {step: pin.reason for step, pin in read_pins(job).items()} == {
        1: "for the paper",
        2: "selection: validation/loss 0.5",
    }


def test_a_resumed_selection_goes_on_and_forgets_steps_after_its_state(job):
    its = selection(job, patience=3)
    seal(job, 1, 2, 3)
    told(its, (1, 2.0), (2, 3.0))
    state = json.loads(json.dumps(its.state_dict()))
    told(its, (3, 1.0))
    assert pinned(job) == [3]
    again = selection(job, patience=3)
    again.load_state_dict(state)
    assert pinned(job) == [1], "3 is abandoned"
    assert again.state_dict() == state
    told(again, (4, 2.0))
    assert pinned(job) == [1]
    assert again.over == ""
    told(again, (5, 2.5))
    assert again.over == "validation/loss no better than 2 for 3 values"
    other = Selection(SelectionSection(metric="critic/score/mean", patience=3), job)
    other.load_state_dict(state)
    assert (other.over, other.state_dict()["best"]) == ("", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e17, -1e17])
def test_a_value_that_no_state_holds_is_not_compared_so_that_the_run_can_be_resumed(job, value):
    its = selection(job)
    told(its, (1, 2.0), (2, value))
    state = json.loads(json.dumps(its.state_dict()))
    again = selection(job)
    again.load_state_dict(state)
    assert again.state_dict()["best"] == 2.0


def test_a_storage_that_refuses_pins_does_not_end_the_run(job, monkeypatch):
    its = selection(job)
    seal(job, 1)
    with monkeypatch.context() as broken:
        broken.setattr("trainer.best_steps.write_pin", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        told(its, (1, 1.0))
    assert pinned(job) == []
    its.keep()
    assert pinned(job) == [1]


def test_evaluations_of_abandoned_versions_are_not_given(tmp_path):
    now = [0.0]
    first = EvaluationWatch(str(tmp_path), lambda: now[0])
    first.resume({}, 4, 1)
    watch = EvaluationWatch(str(tmp_path), lambda: now[0])
    watch.resume(json.loads(json.dumps(first.state_dict())), 8, 2)
    evaluated(str(tmp_path), (1, 4, 0.5), (1, 6, 0.5), (2, 6, 0.5), (2, 9, 0.5), (3, 9, 0.5))
    now[0] += EVERY
    assert [figures["eval/step"] for figures in watch.all_figures()] == [4.0, 6.0, 9.0]
    assert [watch.next_figures().get("eval/step") for _ in range(4)] == [4.0, 6.0, 9.0, None]
    with pytest.raises(CorruptDataError, match="told"):
        watch.resume({"told": [[1, 2]]}, 8, 2)


def evaluated(job, *versions):
    """Append evaluations as `explorer run` writes them: generation, step, reward."""
    os.makedirs(f"{job}/explorers/e0", exist_ok=True)
    lines = [{"generation": of, "step": step, "reward": reward} for of, step, reward in versions]
    append(f"{job}/explorers/e0/evaluations.jsonl", lines)


def test_evaluations_that_came_after_the_last_checkpoint_count_after_a_kill(tmp_path, monkeypatch):
    """Killed at step 5 after the checkpoint of step 4: what was found at 5 and written since is found again, once."""
    monkeypatch.setattr("trainer.parts.evaluation.watch.EVERY", 0.0)
    write_experiences(tmp_path, 8)
    config = small_config(
        tmp_path,
        trainer={"total_steps": 7, "save_interval": 4},
        selection={"metric": "eval/reward", "patience": 9},
    )
    job = Job.at(str(tmp_path))
    with prepared_trainer(config) as (made, shown):
        evaluated(tmp_path, (1, 3, 0.25))
        while len(shown.records) < 5:
            made._do(made.next_action())
            if made.train_step_num == 4:
                evaluated(tmp_path, (1, 2, 0.75))
        assert [figures.get("eval/step") for _, figures in shown.records] == [3, None, None, None, 2]
        assert pinned(job) == [2]
    evaluated(tmp_path, (1, 4, 0.5))
    daemon = start_daemon(config)
    with prepared_trainer(config) as (made, shown):
        assert made.train_step_num == 4
        assert pinned(job) == [2], "retention removes a step that is not pinned for a moment"
        assert made.train() == 0
        assert made.rank0.selection.state_dict()["since"] == 1, "0.25, 0.75, 0.5: each once"
    daemon.close()
    assert [(at, figures.get("eval/step")) for at, figures in shown.records] == [(5, 2), (6, 4), (7, None)]
    assert [values["step"] for values in read_state(job, 7).selection["values"]] == [2]


def test_an_evaluation_that_is_there_at_the_end_of_the_run_is_compared(tmp_path):
    write_experiences(tmp_path, 4)
    config = small_config(tmp_path, trainer={"total_steps": 3}, selection={"metric": "eval/reward"})
    with prepared_trainer(config) as (made, _):
        while made.train_step_num < 3:
            made._do(made.next_action())
        evaluated(tmp_path, (1, 2, 0.5))
        assert made.train() == 0
    assert pinned(Job.at(str(tmp_path))) == [2]


def test_another_figure_begins_with_what_is_known_and_does_not_end_the_run_for_it(job):
    seal(job, 2, 4, 6)
    its = Selection(SelectionSection(metric="eval/reward", patience=2), job)
    figures = [{"eval/step": float(step), "eval/reward": 1.0 / step} for step in (2, 4, 6)]
    its.load_state_dict({"metric": "validation/loss", "best": 1.0, "since": 0, "values": []}, figures)
    assert (pinned(job), its.over) == ([2], "")
    its.observe_all(figures)
    assert its.over == "", "each was compared before"


def test_a_run_ends_early_and_its_best_checkpoint_outlives_retention(tmp_path):
    """What is learnt makes the held-out loss grow: an early step is the best, and three worse ones end the run."""
    (tmp_path / "job").mkdir()
    rows = [{"tokens": [n, 1, 2], "prompt_length": 1} for n in range(8)]
    for name, its in (("train", rows), ("held-out", [{"tokens": [3, 9, 9], "prompt_length": 1}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in its))
    config = small_config(
        tmp_path / "job",
        algorithm={"name": "sft", "optimizer": {"lr": 0.05}},
        data={"sft_path": f"{tmp_path}/train.jsonl", "validation_path": f"{tmp_path}/held-out.jsonl"},
        trainer={
            "total_steps": 50, "save_interval": 1, "max_checkpoints_to_keep": 1, "validation_interval": 1
        },
        selection={"metric": "validation/loss", "goal": "min", "patience": 3},
    )  # fmt: skip
    daemon = start_daemon(config)
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync)
        made.prepare()
        assert made.train() == 0
        made.shutdown()
    daemon.close(tidy=True)
    losses = [metrics["validation/loss"] for _, metrics in shown.records]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 3 < 50
    job = Job.at(config.job.dir)
    assert "no better than" in read_end(job).reason
    assert pinned(job) == [best]
    left = sorted(int(name[12:]) for name in os.listdir(job.root) if name.startswith("global_step_"))
    assert left == [best, best + 3], "the best and the last"
    assert replace(read_pins(job)[best], pinned_at=0.0).reason.startswith("selection: validation/loss")
