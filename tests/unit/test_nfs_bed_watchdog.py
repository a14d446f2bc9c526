"""What looks after the machine of the NFS bed: it ends one that stands still and says what it was at; no other."""

import os
import signal
import subprocess
import sys
import time

import pytest
from beds import alive


@pytest.fixture
def machine(tmp_path):
    """A bed whose machine is a process that sleeps, with another one in its session."""
    process = subprocess.Popen(["sh", "-c", "sleep 100 & wait; sleep 100"], start_new_session=True)
    (tmp_path / "out").mkdir()
    umid = tmp_path / ".uml" / "bed1"
    umid.mkdir(parents=True)
    (umid / "pid").write_text(f"{process.pid}\n")
    while len(alive._processes(str(tmp_path))) < 2:
        time.sleep(0.01)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_machine_without_heartbeats_is_killed_with_its_children(machine, tmp_path):
    (tmp_path / "out" / "heartbeat").write_text("12.5\n")
    _, other = alive._processes(str(tmp_path))
    alive.main(str(tmp_path), "1")
    assert machine.wait(10) == -signal.SIGKILL
    said = (tmp_path / "out" / "standstill.log").read_text()
    assert "the last one: 12.5 s up" in said
    assert "version: no answer" in said
    assert f"process {machine.pid}: " in said
    assert f"process {other}: " in said


@pytest.mark.slow
def test_a_machine_with_heartbeats_is_not_killed(machine, tmp_path):
    watch = subprocess.Popen([sys.executable, alive.__file__, str(tmp_path), "2"])
    for beat in range(40):
        (tmp_path / "out" / "heartbeat").write_text(f"{beat}\n")
        time.sleep(0.1)
    assert watch.poll() is None
    watch.kill()
    watch.wait()
    assert machine.poll() is None
    assert not (tmp_path / "out" / "standstill.log").exists()
