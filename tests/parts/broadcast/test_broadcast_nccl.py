"""The way over NCCL between real processes, with a group over gloo in the place of NCCL's: no GPU is needed."""

import json

from support.broadcasts import HERE, left_over

STEPS = 4
PROGRAM = f"{HERE}/programs/as_if_nccl.py"


def start(processes, names, failing="", timeout="20"):
    for name in names:
        fails = "1" if name == failing else "0"
        processes.start(name, PROGRAM, "receive", fails, processes.job, name, "fixed", STEPS)
    options = ("fixed", STEPS, len(names), "", timeout)
    processes.start("trainer", PROGRAM, "send", "0", processes.job, *options)
    for name in ("trainer", *names):
        processes.ended(name)


def lines(processes, name, word):
    """Return the lines of a process's log that have a word."""
    with open(f"{processes.job}.{name}.log", encoding="utf-8") as log:
        return [line for line in log if word in line]


def made(processes, name):
    """Return how each group over NCCL was made."""
    return [json.loads(line.removeprefix("nccl ")) for line in lines(processes, name, "nccl {")]


def check(processes, names):
    trained = processes.result("trainer")
    for name in names:
        found = processes.result(name)
        assert found["digest"] == trained["digest"]
        assert found["applied"] == [1, STEPS]
        assert found["sockets"] == []
    assert trained["sockets"] == []
    assert left_over(processes.job) == []
    return trained


def test_nccl_is_used_if_each_process_has_its_own_gpu(processes):
    names = ["e0", "e1"]
    start(processes, names)
    check(processes, names)
    ranks = set()
    for name in ("trainer", *names):
        for group in made(processes, name):
            assert group["size"] == 3
            assert 0 < group["timeout"] <= 20
            assert not group["watched"], "torch's watchdog ends the process"
            ranks.add((name, group["rank"]))
    assert ranks == {("trainer", 0), ("e0", 1), ("e1", 2)}
    for name in names:
        assert "broadcast" in {way for _, way in processes.result(name)["ways"]}
    formed = lines(processes, "trainer", "broadcast_group_formed")
    assert formed != []
    assert all("backend=nccl" in line for line in formed)


def test_after_nccl_fails_the_step_uses_files_and_the_next_uses_gloo(processes):
    """It fails on a member; the trainer gives its own group up within its time."""
    names = ["e0", "e1"]
    start(processes, names, failing="e1", timeout="8")
    trained = check(processes, names)
    assert len(made(processes, "e1")) == 1, "it is tried once"
    sent = [is_done for _, is_done in trained["ends"]]
    assert sent.index(False) < sent.index(True)
    assert lines(processes, "trainer", "NCCL has failed with these explorers") != []
