"""The evaluation of the last version comes after the last training step, and is reported all the same."""

import os
import threading
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.trainers import prepared_trainer, small_config, write_experiences

from syncd.jsonl import append
from syncd.protocol.job_end import read_end
from syncd.protocol.layout import Job
from syncd.protocol.request import read_pins
from syncd.synchronizer import Synchronizer
from trainer.launch.daemon import start_daemon


def evaluated(job, step, **figures):
    os.makedirs(f"{job}/explorers/e0", exist_ok=True)
    line = {"generation": 1, "step": step, "reward": step / 8, "tasks": 4} | figures
    append(f"{job}/explorers/e0/evaluations.jsonl", [line])


def finished(job, then):
    """Do something in a thread once the job is finished, as an explorer does that ends with it."""

    def work():
        while read_end(Job.at(str(job))) is None:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def run(job, then, *, stop=False, **trainer):
    """Train three steps beside an explorer that has evaluated the first; return what was reported of evaluations."""
    write_experiences(job, 4)
    evaluated(job, 1)
    config = small_config(
        job, trainer={"total_steps": 3, **trainer}, selection={"metric": "eval/reward", "keep_best": 1}
    )
    daemon = start_daemon(config)
    with Synchronizer.open(str(job), "explorer", "e0") as explorer, prepared_trainer(config) as (made, shown):
        thread = finished(job, lambda: then(explorer))
        assert made.train() == 0
        before = len(shown.records)
        if stop:
            made._stop.requested = 15
        made.shutdown()
        thread.join(60)
    daemon.close()
    return [(step, figures) for step, figures in shown.records[before:] if "eval/step" in figures]


def test_the_evaluation_that_comes_after_the_last_step_is_reported_and_compared(tmp_path):
    def then(explorer):
        time.sleep(1.0)
        evaluated(tmp_path, 2)
        time.sleep(1.0)
        evaluated(tmp_path, 3)

    found = run(tmp_path, then, evaluation_wait=120.0)
    assert [(step, figures["eval/step"], figures["eval/reward"]) for step, figures in found][-1] == (
        3,
        3.0,
        0.375,
    )
    assert {figures["eval/step"] for _, figures in found} >= {2.0, 3.0}
    assert list(read_pins(Job.at(str(tmp_path)))) == [3], "the last version is the best"


def test_nothing_is_awaited_once_the_explorers_have_left(tmp_path):
    begin = time.monotonic()
    assert [figures["eval/step"] for _, figures in run(tmp_path, lambda explorer: explorer.close())] in (
        [],
        [1.0],
    )
    assert time.monotonic() - begin < 500, "600 s are allowed"


@pytest.mark.parametrize("how", [{"evaluation_wait": 0.0}, {"evaluation_wait": 0.2}, {"stop": True}])
def test_the_wait_is_bounded(tmp_path, how):
    begin = time.monotonic()
    found = run(tmp_path, lambda explorer: None, **how)
    assert 3.0 not in [figures["eval/step"] for _, figures in found]
    assert time.monotonic() - begin < 500, "600 s are allowed unless the file says less"
