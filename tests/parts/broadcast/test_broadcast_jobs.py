"""Broadcasts between real processes: the trainer's loop, explorers, a daemon; gloo on this host."""

import itertools

import pytest
from support import matrices
from support.broadcasts import SIZES, left_over, write_experiences
from support.job_file import tiny_job, write_job

STEPS = 4
STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")
KEPT = (("fixed", 3), ("trainer_driven", 1), ("explorer_driven", 1), ("fully_async", 1))


@pytest.mark.parametrize(("style", "members"), matrices.rows(itertools.product(STYLES, (1, 3)), *KEPT))
def test_trainer_and_explorers_end_with_the_same_weights(processes, style, members):
    names = [f"e{number}" for number in range(members)]
    for name in names:
        processes.explorer(name, style, STEPS)
    processes.trainer(style, STEPS, members)
    for name in ("trainer", *names):
        processes.ended(name)
    trained = processes.result("trainer")
    for name in names:
        found = processes.result(name)
        assert found["digest"] == trained["digest"]
        assert found["applied"] == [1, STEPS]
        assert [way for _, way in found["ways"]].count("broadcast") >= 1
    assert [step for step, _ in trained["ends"]] != []
    assert left_over(processes.job) == []


def test_a_trainer_of_two_ranks_broadcasts_as_one(processes):
    """By its own command; both ranks walk the export, and the first one sends."""
    job = tiny_job(
        processes.job,
        engine={"options": SIZES},
        sync={"method": "nccl", "bucket_mib": 1},
        trainer={"start_daemon": False, "nproc": 2, "total_steps": 3},
    )
    write_job(f"{processes.job}.toml", job)
    write_experiences(processes.job, 6)
    processes.explorer("e0", "fixed", 3, "", "end")
    processes.until(lambda: "ready" in processes.log("e0"))
    processes.start("trainer", "-m", "trainer", "train", f"{processes.job}.toml")
    for name in ("trainer", "e0"):
        processes.ended(name)
    found = processes.result("e0")
    assert "broadcast" in {way for _, way in found["ways"]}, processes.log("trainer")
    assert found["applied"] == [1, 3]
    assert left_over(processes.job) == []
