"""What is urgent comes first, each kind once; a job that is over or not begun is no emergency."""

import os
import re

import pytest
from support.jobs import ManualClock, explorer, start, write_step
from support.paths import ROOT
from support.presences import BeatingPublisher

from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence, RunningStatus
from syncd.views import documents
from syncd.views.job_view import JobViewer
from syncd.views.problem_groups import KINDS, problem_groups, worst


@pytest.fixture
def job(tmp_path):
    os.mkdir(tmp_path / "job")
    return Job.at(tmp_path / "job")


@pytest.fixture
def clock():
    return ManualClock()


def trainer(job, clock, **state):
    made = BeatingPublisher(job.disk, clock, job.trainers, Presence("t0", incarnation="i"))
    made.prepare()
    made.update(**state)
    return made


def aged(job, clock, *beating):
    """Return the status after a minute in which only some modules beat."""
    viewer = JobViewer(job, clock)
    viewer.read()
    for _ in range(13):
        clock.at += 5
        for module in beating:
            module.update()
        view = viewer.read()
    return documents.status(view)


def groups(status):
    return [(one["severity"], one["name"], one["count"]) for one in status["problem_groups"]]


def test_dead_explorers_are_one_group_after_the_missing_daemon(job, clock):
    write_step(job, 1)
    alive = explorer(job, clock, "alive")
    for number in range(9):
        explorer(job, clock, f"e{number}")
    status = aged(job, clock, alive)
    assert groups(status) == [("critical", "daemon", 1), ("warning", "dead_explorer", 9)]
    daemon, dead = status["problem_groups"]
    assert daemon["hint"] == f"syncd watch {job.root}"
    assert dead["text"] == "9 explorers are dead"
    assert dead["details"] == [f"e{number}" for number in range(9)]
    assert worst(status["problem_groups"]) == "critical"


def test_without_any_explorer_that_works_the_dead_ones_are_critical(job, clock):
    write_step(job, 1)
    explorer(job, clock, "e0")
    wrong = explorer(job, clock, "e1", info=EngineReport(EngineState.WRONG, reason="stale").document())
    assert groups(aged(job, clock, wrong))[1:] == [
        ("critical", "engine_wrong", 1),
        ("critical", "dead_explorer", 1),
    ]


def test_a_dead_trainer_is_critical_and_said_by_name(job, clock):
    write_step(job, 1)
    trainer(job, clock, step=1)
    (dead,) = [one for one in aged(job, clock)["problem_groups"] if one["name"] == "dead_trainer"]
    assert (dead["severity"], dead["text"]) == ("critical", "trainer t0 is dead")


@pytest.mark.parametrize("name", ["daemon", "marker", "explorer/vllm-0", "something_new"])
def test_every_problem_is_in_a_group(name):
    status = {
        "job": "/j",
        "version": {},
        "problems": [{"name": name, "detail": "it says {why}"}] * 2,
        "explorers": [],
        "trainers": [],
        "finished": None,
    }
    (group,) = problem_groups(status)
    assert group["count"] == len(group["details"]) == 2
    assert "it says {why}" in group["details"][0]


def test_every_documented_name_has_a_severity():
    text = (ROOT / "docs" / "json.md").read_text()
    named = text.split("`problems[].name` is one of ")[1].split("or the identity")[0]
    assert set(re.findall(r"`(\w+)`", named)) - {"dead"} <= set(KINDS)
    groups_row = next(
        row for row in text.splitlines() if row.startswith("| `name` | text | as in `problems`")
    )
    assert set(re.findall(r"`(\w+)`", groups_row)) - {"name", "problems"} == {
        "dead_explorer",
        "dead_trainer",
        "presence",
    }


# --- finished -----------------------------------------------------------------------------------------------


def finish(job, clock, status=RunningStatus.STOPPED):
    write_step(job, 1)
    trainer(job, clock, step=1, status=status)
    mark_finished(job, JobEnd(1, "total_steps 1 reached"))


def test_a_finished_job_is_no_emergency(job, clock):
    finish(job, clock)
    explorer(job, clock, "e0")
    status = aged(job, clock)
    assert status["finished"] == {"step": 1, "reason": "total_steps 1 reached"}
    assert groups(status) == [("notice", "daemon", 1), ("notice", "dead_explorer", 1)]
    assert status["problem_groups"][0]["text"] == "no daemon leads this job; a finished job needs none"


def test_a_job_whose_trainer_may_still_run_is_not_finished(job, clock):
    finish(job, clock, RunningStatus.RUNNING)
    viewer = JobViewer(job, clock)
    assert documents.status(viewer.read())["finished"] is None
    clock.at += 61
    assert documents.status(viewer.read())["finished"] is not None, "it was killed after its last checkpoint"


def test_the_newest_full_checkpoint_shows_the_end_too(job, clock):
    write_step(job, 4, full=True)
    with open(f"{job.root}/config.toml", "w") as file:
        file.write("[trainer]\ntotal_steps = 5\n")
    job.disk.replace(job.tracker, b"4")
    assert documents.status(JobViewer(job, clock).read())["finished"] is None
    job.disk.replace(job.tracker, b"5")
    assert documents.status(JobViewer(job, clock).read())["finished"]["step"] == 5


# --- what comes next ----------------------------------------------------------------------------------------


def next_of(job, clock):
    return documents.status(JobViewer(job, clock).read())["next"]


def test_an_empty_job_is_no_emergency_and_says_what_comes_next(job, clock):
    status = documents.status(JobViewer(job, clock).read())
    assert groups(status) == [("notice", "daemon", 1)]
    assert status["next"]["command"] == f"syncd watch {job.root}"
    start(job, clock)[0].tick()
    assert next_of(job, clock)["command"] == f"syncd publish {job.root} 1 MODEL_DIRECTORY"
    trainer(job, clock)
    assert next_of(job, clock)["command"] == f"syncd wait {job.root}"
    write_step(job, 1)
    assert next_of(job, clock) is None


@pytest.mark.parametrize(("directory", "is_its_own"), [("job", True), ("{job}", True), ("other", False)])
def test_a_job_file_beside_the_job_is_what_is_trained_next(job, clock, directory, is_its_own):
    path = f"{os.path.dirname(job.root)}/job.toml"
    with open(path, "w") as file:
        file.write(f'[job]\ndir = "{directory.format(job=job.root)}"\n')
    assert (next_of(job, clock)["command"] == f"trainer train {path}") is is_its_own


def test_an_absent_or_broken_job_file_is_ignored(job, clock):
    with open(f"{os.path.dirname(job.root)}/job.toml", "w") as file:
        file.write("[job\n")
    assert next_of(job, clock)["command"].startswith("syncd watch ")


def test_a_published_step_that_lost_a_file_comes_with_the_command_that_says_which(job, clock):
    write_step(job, 1)
    daemon, _, _ = start(job, clock)
    daemon.tick()
    os.unlink(f"{job.step(1)}/actor/model-00001-of-00001.safetensors")
    status = documents.status(JobViewer(job, clock).read())
    hints = {item["name"]: item["hint"] for item in status["problem_groups"]}
    assert hints["published_step"] == hints["damaged_step"] == f"syncd verify {job.root} 1 --deep"
