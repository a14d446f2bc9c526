"""Trainer and explorers as processes of their own: whole runs in each style, and kills."""

import os
import signal
import subprocess
import sys

import pytest
from support.processes import PROGRAMS
from support.synchronizers import LONG, Threads, World, eventually

from syncd.errors import UsageError
from syncd.protocol.presence import RunningStatus

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, Threads())
    yield made
    made.shut()


@pytest.fixture
def spawn(world):
    started = []

    def start(kind, *arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, f"{PROGRAMS}/module.py", kind, world.root, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def killed(process):
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


def said(process):
    out, _ = process.communicate(timeout=2 * LONG)
    assert process.returncode == 0
    return [int(word) for word in out.split()[1:]]


@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven", "fully_async"])
def test_a_trainer_and_two_explorers_run_to_completion(world, spawn, style):
    world.run()
    fast = spawn("explorer", "fast", 8, 2, style, 0.01)
    slow = spawn("explorer", "slow", 8, 2, style, 0.1)
    trainer = spawn("trainer", 8, 2, style)
    ends = [said(process) for process in (trainer, fast, slow)]
    assert ends[0] == [8] or style == "explorer_driven"
    for loaded in ends[1:]:
        assert loaded
        assert loaded == sorted(set(loaded))
        assert set(loaded) <= ({2, 4, 6, 8} if style != "explorer_driven" else set(range(1, 9)))
    statuses = {world.explorer(name).status for name in ("fast", "slow")} | {world.trainer().status}
    assert statuses == {STOPPED}


@pytest.mark.fault("a dead trainer looks alive for an hour")
def test_a_killed_trainer_ends_a_wait(world, spawn):
    process = spawn("wait", "trainer", "trainer")
    explorer = world.open("explorer", "e0")
    eventually(lambda: explorer.get_trainer_status() is RUNNING)
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(lambda: world.explorer("e0").status is REQUIRE_SYNC)
    killed(process)
    assert call.result(LONG) == 0
    assert explorer.get_trainer_status() is STOPPED
    assert world.trainer().status is not STOPPED  # nobody wrote it for the dead


@pytest.mark.fault("a dead explorer counts for ever")
def test_a_killed_explorer_counts_as_stopped_and_may_return(world, spawn):
    trainer = world.open("trainer")
    process = spawn("wait", "explorer", "e0")
    eventually(lambda: trainer.get_explorer_status_counts()[RUNNING] == 1)
    with pytest.raises(UsageError, match="in use by another"):
        world.open("explorer", "e0")
    killed(process)
    assert trainer.get_explorer_status_counts() == {RUNNING: 0, REQUIRE_SYNC: 0, STOPPED: 1}
    assert trainer.ready_to_nccl_sync("trainer", 1) is None
    world.open("explorer", "e0")
    assert trainer.get_explorer_status_counts()[RUNNING] == 1


@pytest.mark.fault("an explorer that waits before the trainer has started returns at once")
def test_a_wait_ignores_a_trainer_that_was_killed_earlier(world, spawn):
    killed(spawn("wait", "trainer", "trainer"))
    explorer = world.open("explorer", "e0")
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(lambda: world.explorer("e0").status is REQUIRE_SYNC)
    trainer = world.open("trainer")
    assert not call.done()
    trainer.set_model_state_dict({"w": ("F32", (1,), b"1234")}, 1)
    world.tick()
    assert call.result(LONG) == 1


def test_an_interrupted_wait_leaves_the_status_running(world, spawn):
    process = spawn("wait", "explorer", "e0")
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGINT)
    process.wait()
    assert world.explorer("e0").status is RUNNING
    assert world.open("trainer").get_explorer_status_counts()[STOPPED] == 1


def test_the_synchronizer_imports_no_third_party_packages():
    code = "import sys, syncd.synchronizer; print([m for m in ('torch', 'numpy', 'structlog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
