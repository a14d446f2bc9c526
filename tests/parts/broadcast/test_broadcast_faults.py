"""A broadcast that breaks off at any phase, on any side: within its time all end on the same step, by files.

SYNCD_BROADCAST_FAULTS says how many faults are drawn at random, instead of the few that are tried by default.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from support import matrices
from support.broadcasts import ENVIRONMENT, HERE, LONG, left_over

STEPS = 4
TIMEOUT = "10"
"""Seconds of one broadcast: time enough for one that nothing disturbs, on a loaded machine too."""
PLACES = {
    ("explorer", "asked"): (1, 2),
    ("explorer", "joined"): (1,),
    ("explorer", "bucket"): (1, 2),
    ("explorer", "confirming"): (1, 2),
    ("trainer", "asked"): (1,),
    ("trainer", "joined"): (1,),
    ("trainer", "bucket"): (1, 2),
    ("trainer", "confirming"): (1, 2),
}
"""In which broadcast each phase is come to: a group is offered, formed and joined once, and kept by the next ones."""

MET_LINE = "the fault strikes"
"""What programs/receive.py says right before a fault strikes."""

DRAWN = int(os.environ.get("SYNCD_BROADCAST_FAULTS", "0"))
SEED = int(os.environ.get("SYNCD_SEED", "1"))
KEPT = [("trainer", "joined", "SIGKILL", 1), ("trainer", "bucket", "SIGSTOP", 2)]
"""Of explorers, `make test` has a killed one in test_broadcast_members.py, and a stopped one whose link is cut."""

FEW = [
    *KEPT,
    ("trainer", "joined", "SIGSTOP", 1),
    ("explorer", "bucket", "SIGKILL", 2),
    ("explorer", "confirming", "SIGSTOP", 2),
]

MET = []
"""The faults of this session that were met."""


def drawn():
    draw = random.Random(SEED)
    every = [
        (side, phase, name, place)
        for (side, phase), places in PLACES.items()
        for name, place in itertools.product(("SIGKILL", "SIGSTOP"), places)
    ]
    return [draw.choice(every) for _ in range(DRAWN)] if DRAWN else FEW


def check(processes, names, generations=(1,)):
    """All have ended on the weights of the last step, by what is published, and hold nothing."""
    trained = processes.result("trainer")
    assert trained["sockets"] == []
    for name in names:
        found = processes.result(name)
        assert found["digest"] == trained["digest"], name
        assert found["applied"][1] == STEPS
        assert found["applied"][0] in generations
        assert found["sockets"] == []
    assert left_over(processes.job) == []
    return trained


@pytest.mark.fault("two explorers break the broadcast")
@pytest.mark.fault("a failed broadcast still advances the version")
@pytest.mark.parametrize(
    ("number", "fault"),
    list(enumerate(drawn())) if DRAWN else matrices.rows(enumerate(FEW), *enumerate(KEPT)),
)
def test_a_failed_broadcast_falls_back_to_files(processes, record_line, number, fault):
    side, phase, name, place = fault
    text = f"{phase}:{name}:{place}"
    if side == "explorer":
        an_explorer_fails(processes, text)
    else:
        the_trainer_fails(processes, text, name)
    victim = "e0" if side == "explorer" else "trainer"
    with open(f"{processes.job}.{victim}.log", encoding="utf-8", errors="replace") as log:
        assert log.read().count(MET_LINE) == 1, f"fault {number} was not met: {processes.log(victim)}"
    MET.append(text)
    record_line(f"broadcast: {len(MET)} faults met, the last one {text} on the {side}'s side")


def an_explorer_fails(processes, text):
    """Training goes on to its end, and so do the others."""
    victim = processes.explorer("e0", "fixed", STEPS, text)
    for name in ("e1", "e2"):
        processes.explorer(name, "fixed", STEPS)
    processes.trainer("fixed", STEPS, 3, "", TIMEOUT)
    for name in ("trainer", "e1", "e2"):
        processes.ended(name)
    trained = check(processes, ("e1", "e2"))
    assert not all(sent for _, sent in trained["ends"]), "the fault has struck"
    assert victim.poll() == (-signal.SIGKILL if "SIGKILL" in text else None)


def the_trainer_fails(processes, text, name):
    """Explorers wait without hanging in a collective, and go on with it, or with its successor."""
    for explorer in ("e0", "e1"):
        processes.explorer(explorer, "fixed", STEPS, "", "end")
    victim = processes.trainer("fixed", STEPS, 2, text, TIMEOUT)
    if name == "SIGKILL":
        assert victim.wait(LONG) == -signal.SIGKILL
        processes.trainer("fixed", STEPS, 2, "", TIMEOUT)
    else:
        processes.until(lambda: stopped(victim.pid))
        if text.startswith("asked"):
            time.sleep(float(TIMEOUT))  # no broadcast has begun: nobody has one to give up
        else:
            processes.until(lambda: all("broadcast_failed" in processes.log(e) for e in ("e0", "e1")))
        victim.send_signal(signal.SIGCONT)
    for one in ("trainer", "e0", "e1"):
        processes.ended(one)
    check(processes, ("e0", "e1"), generations=(1, 2))


def stopped(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def apart():
    """A network of its own, linked to this one: what runs a command in it, and both addresses."""
    name = f"cast{os.getpid() % 10000}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        try:
            ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual links here: {error}")
        ip("addr", "add", "10.213.7.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", "10.213.7.2/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield name
    finally:
        ip("netns", "del", name)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def test_a_cut_network_link_falls_back_to_files(processes, apart):
    """The member is held in the midst of a broadcast, and goes on with the link cut: only files reach it."""
    program = [sys.executable, f"{HERE}/programs/receive.py", processes.job, "e0", "fixed", str(STEPS)]
    with open(f"{processes.job}.e0.log", "wb") as log:
        member = subprocess.Popen(
            ["ip", "netns", "exec", apart, *program, "bucket:SIGSTOP:2", "end"],
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    try:
        processes.trainer("fixed", STEPS, 1, "", TIMEOUT, "10.213.7.1")
        processes.until(lambda: stopped(member.pid))
        ip("link", "set", f"{apart}a", "down")
        member.send_signal(signal.SIGCONT)
        processes.ended("trainer")
        assert member.wait(LONG) == 0, processes.log("e0")
    finally:
        member.kill()
        member.wait()
    trained = check(processes, ("e0",))
    assert trained["ends"][:2] == [[1, True], [2, False]]
    assert {way for step, way in processes.result("e0")["ways"] if step > 1} == {"files"}


def test_a_model_of_another_shape_gets_its_steps_from_files(processes):
    """It refuses before a byte is sent, every time; the trainer leaves it alone more and more."""
    processes.explorer("e0", "fixed", 2, "shape:SIGKILL:1", "end")
    processes.trainer("fixed", 2, 1, "", TIMEOUT)
    processes.ended("trainer")
    assert "is not expected" in processes.log("e0")
    processes.ended("e0")
    assert {way for _, way in processes.result("e0")["ways"]} == {"files"}
    assert processes.result("trainer")["ends"][0] == [1, False]
    assert left_over(processes.job) == []
