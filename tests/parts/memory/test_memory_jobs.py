"""Whole jobs by memory, and kill -9 of a trainer or an explorer in the midst: nothing wrong, nothing left."""

import contextlib
import os
import signal
import time

import pytest
from support import matrices
from support.job_file import tiny_job, write_job
from support.paths import TESTS
from support.whole_jobs import RANK, ended, free_port, journal_lines, logs, program

from syncd.protocol.memory_copies import copies_in

pytestmark = pytest.mark.slow

LIMIT = 100.0
STEPS = 4
OWN = {
    "engine": {"options": {"pause": 0.05}},
    "data": {"end_when_left": False},
    "trainer": {"nproc": 1, "save_interval": 1, "total_steps": STEPS, "start_daemon": False},
}


class Whole:
    """A job with a daemon, and what is started over it."""

    def __init__(self, place, memory, running):
        self.place, self.job, self.memory, self._running = place, f"{place}/job", memory, running
        os.mkdir(self.job)
        sync = {"method": "memory", "memory_dir": str(memory)}
        write_job(f"{place}/job.toml", tiny_job(self.job, sync=sync, **OWN))
        write_experiences(self.job, STEPS + 2)
        self.daemon = self.start("daemon", "-m", "syncd", "watch", self.job, "--keep-last", "99")

    def start(self, *argv, **more):
        return self._running.enter_context(program(self.place, *argv, **more))

    def trainer(self, *options):
        command = ("-m", "trainer", "train", f"{self.place}/job.toml", *options)
        return self.start("trainer", *command, **RANK, MASTER_PORT=str(free_port()))

    def killed_trainer(self, phase, number):
        command = (f"{TESTS}/parts/memory/programs/upload.py", f"{self.place}/job.toml", phase, str(number))
        killed = self.start("killed", *command, **RANK, MASTER_PORT=str(free_port()))
        self.ends(killed, -signal.SIGKILL)

    def explorer(self, name, *options):
        journal = f"{self.place}/{name}.journal"
        program = f"{TESTS}/programs/explore.py"
        return self.start(name, program, self.job, name, journal, "--limit", str(LIMIT), *options)

    def lines(self, name):
        return journal_lines(self.place, name) if os.path.exists(f"{self.place}/{name}.journal") else []

    def until(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, logs(self.place)
            time.sleep(0.02)

    def ends(self, process, code=0):
        assert ended(process, time.monotonic() + LIMIT) == code, logs(self.place)

    def copies(self):
        """Return the copies in memory, and what is left of some."""
        return [copy for name in os.listdir(self.memory) for copy in copies_in(f"{self.memory}/{name}")]

    def read_from_memory(self, name):
        """Return the steps that an explorer has loaded from memory; it compares every byte with the manifest."""
        found = [line for line in self.lines(name) if line["event"] == "runs"]
        return [line["pair"][1] for line in found if line["path"].startswith(f"{self.memory}/")]


def write_experiences(job, steps):
    from support.trainers import write_experiences as write

    write(job, steps)


@pytest.fixture
def whole(tmp_path, shm):
    with contextlib.ExitStack() as running:
        yield Whole(tmp_path, shm, running)


@pytest.mark.parametrize("phase", matrices.rows(["room", "put", "seal", "sealed"], "put"))
def test_copies_of_a_killed_trainer_are_not_loaded_and_the_next_start_removes_them(whole, phase):
    whole.killed_trainer(phase, 2)
    left = whole.copies()
    assert len(left) == 2, "the first is whole, the second was being made"
    explorer = whole.explorer("e0")
    whole.ends(whole.trainer())
    whole.ends(explorer)
    assert whole.lines("e0")[-1]["pair"][1] == STEPS
    assert whole.copies() == []
    assert os.listdir(whole.memory) == []


def test_a_killed_explorer_leaves_no_copies(whole):
    explorer = whole.explorer("e0", "--hang-at", "1")
    trainer = whole.trainer()
    whole.until(lambda: whole.lines("e0"))
    assert whole.lines("e0")[-1]["path"].startswith(whole.memory)
    explorer.kill()
    whole.ends(explorer, -signal.SIGKILL)
    whole.ends(trainer)
    assert os.listdir(whole.memory) == []


def test_a_copy_in_use_outlives_its_trainer_and_is_removed_with_its_reader(whole):
    """The trainer is killed, starts again, and ends; the reader finds every byte as it was."""
    explorer = whole.explorer("e0", "--hang-at", "1")
    whole.killed_trainer("sealed", 3)
    whole.until(lambda: whole.lines("e0"))
    read = whole.lines("e0")[-1]["path"].removeprefix(f"{whole.memory}/").split("/")[1]
    assert read in whole.copies()
    whole.ends(whole.trainer())
    assert whole.copies() == [read]
    with open(f"{whole.place}/e0.journal.go", "w", encoding="ascii"):
        pass
    whole.ends(explorer)
    assert whole.lines("e0")[1]["event"] == "runs"
    assert whole.read_from_memory("e0")
    assert whole.lines("e0")[-1]["pair"][1] == STEPS
    assert os.listdir(whole.memory) == []


def test_steps_without_room_in_memory_are_loaded_from_files(whole):
    explorer = whole.explorer("e0")
    whole.ends(whole.trainer("--sync.memory_mib", "1"))
    whole.ends(explorer)
    assert whole.read_from_memory("e0") == []
    assert whole.lines("e0")[-1]["pair"][1] == STEPS
    with open(f"{whole.place}/trainer.log", encoding="utf-8") as log:
        assert "memory_copy_skipped" in log.read()
    assert os.listdir(whole.memory) == []
