"""`explorer run` as a member of broadcasts: a real trainer's loop, ready explorers and a daemon, each a process."""

import itertools
import json
import os
import signal
import statistics

import pytest
from support import forked, matrices
from support.broadcasts import ENVIRONMENT, HERE, LONG, left_over
from support.job_file import tiny_job, write_job

from syncd.protocol.layout import Job
from syncd.protocol.presence import path_of, read_presence

STEPS = 3


def write_scene(processes, start, style, *, method="nccl", memory="/dev/shm", steps=STEPS):
    """Write the file of a job in which explorers follow broadcasts, and return its path."""
    sync = {"method": method, "memory_dir": memory, "style": style, "dtype": "keep", "delta": "off"}
    limits = {"timeout": 60, "ready_timeout": 30, "broadcast_timeout": 10}
    job = tiny_job(
        processes.job,
        model={"path": f"{start}/model"},
        data={"consumed": "archive", "end_when_left": False, "wait_timeout": 60.0},
        sync=sync | limits,
        trainer={"total_steps": steps},
        explorer={"tasks": f"{start}/tasks.jsonl", "sampling": {"max_tokens": 4}},
    )
    write_job(f"{processes.job}.toml", job)
    return f"{processes.job}.toml"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a directory with a model and tasks."""
    return begun(tmp_path_factory.mktemp("start"))


def begun(directory):
    made = forked.start(f"{directory}/log", ENVIRONMENT, f"{HERE}/programs/start.py", directory)
    assert made.wait(LONG) == 0, made.said()
    return directory


@pytest.fixture
def scene(processes, start):
    """Return what begins a job of a style; it returns the explorers' names."""

    def begin(style, members, *faults, **more):
        file = write_scene(processes, start, style, **more)
        names = [f"e{number}" for number in range(members)]
        for number, name in enumerate(names):
            program = f"{HERE}/programs/member.py"
            processes.start(name, program, file, processes.job, name, *faults[number : number + 1])
        processes.start("trainer", f"{HERE}/programs/teach.py", file, processes.job, members)
        return names

    return begin


def heard(processes, name, event, field="version"):
    """Return the versions that an explorer's log names with an event, or another field of it."""
    with open(f"{processes.job}.{name}.log", encoding="utf-8") as log:
        lines = [json.loads(line) for line in log if line.startswith("{")]
    return [line[field] for line in lines if line["event"] == event]


def applied(processes, name):
    job = Job.at(processes.job)
    return read_presence(job.disk, path_of(job.explorers, name)).applied


def check(processes, names, steps=STEPS):
    """All have ended by themselves on the same weights, and what was trained on was made by what it names."""
    for name in ("trainer", *names):
        processes.ended(name)
    trained = processes.result("trainer")
    for name in names:
        found = processes.result(name)
        assert found["digest"] == trained["digest"], processes.log(name)
        assert found["why"].startswith(("the trainer is gone", "the job is finished"))
        assert found["sockets"] == []
        assert applied(processes, name) == (1, steps)
    assert left_over(processes.job) == []
    for one in trained["found"]:
        assert one["generation"] == 1
        assert one["own"] < 1e-3, one
        assert one["age"] == one["trained"] - 1 - one["step"]
    others = [one["other"] for one in trained["found"] if one["other"] is not None]
    assert statistics.median(others) > 1e-2, "log-probs tell the steps apart"
    return trained


STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")
KEPT = (("fixed", 1), ("trainer_driven", 3), ("explorer_driven", 1), ("fully_async", 1))


@pytest.mark.parametrize(("style", "members"), matrices.rows(itertools.product(STYLES, (1, 3)), *KEPT))
def test_ready_explorers_join_broadcasts_and_label_experiences_correctly(processes, scene, style, members):
    names = scene(style, members)
    trained = check(processes, names)
    for name in names:
        assert heard(processes, name, "broadcast_received"), processes.log(name)
    if style in {"fixed", "trainer_driven"}:
        assert all(sent for _, sent in trained["ends"]), trained["ends"]
        assert [heard(processes, name, "broadcast_received") for name in names] == [
            ["1.1", "1.2", "1.3"]
        ] * members
        assert [heard(processes, name, "version_applied") for name in names] == [[]] * members, (
            "no file was loaded"
        )
    if members == 1 and style == "fixed":
        assert {one["age"] for one in trained["found"]} == {0}


@pytest.mark.fault("two explorers break the broadcast")
def test_an_explorer_killed_in_a_broadcast_leaves_the_step_to_files(processes, scene):
    names = scene("fixed", 3, "confirming:SIGKILL:2")
    assert processes.all["e0"].wait(LONG) == -signal.SIGKILL
    trained = check(processes, names[1:])
    assert [2, False] in trained["ends"]
    for name in names[1:]:
        # On a busy machine the next broadcast may overtake the files.
        assert "1.2" in heard(processes, name, "version_applied") or "1.3" in heard(
            processes, name, "broadcast_received"
        )
        assert "1.2" not in heard(processes, name, "broadcast_received")
        assert "1.1" in heard(processes, name, "broadcast_received")


def test_auto_measures_each_method_and_then_uses_the_fastest(processes, scene, shm):
    """All three ways bring the same weights, and experiences name the right version whichever way it came."""
    names = scene("fixed", 1, method="auto", memory=shm, steps=5)
    trained = check(processes, names, 5)
    ways = [way for way, _ in trained["ways"]]
    assert ways[:3] == ["checkpoint", "memory", "nccl"], trained["ways"]
    assert [reason for _, reason in trained["ways"][:3]] == [
        f"{way} was not measured yet" for way in ways[:3]
    ]
    assert all(
        "would take about as long" in why or "takes the least" in why for _, why in trained["ways"][3:]
    )
    assert trained["ends"][0] == [3, True]
    assert heard(processes, "e0", "broadcast_received")[0] == "1.3"
    assert heard(processes, "e0", "version_applied")[:2] == ["1.1", "1.2"]
    assert heard(processes, "e0", "version_applied", "source")[:2] == ["files", "memory"]
    assert os.listdir(shm) == []
