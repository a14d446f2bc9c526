"""Jobs with many files below them, steps of high numbers, many explorers that have come and gone."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time

import pytest
from support.jobs import ManualClock, explorer, start, steps_of, write_step
from support.processes import PROGRAMS, syncd
from support.sweep import ENVIRONMENT, python

from syncd.daemon.removals import FORGET_AFTER
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import read_presences
from syncd.protocol.version import read_version, write_marker

FEW, MANY = 1000, int(os.environ.get("SYNCD_FILES", "100000"))
"""SYNCD_FILES=1000000 for the million, which takes some minutes to make."""

# Where a job has files that are nobody's business here: of strangers, of explorers, inside steps.
PLACES = (
    "wandb/run-1/files",
    "notes",
    "experiences/e0",
    "explorers/e0/attempts",
    "global_step_1/optimizer/shards",
    "global_step_2/actor/cache",
    ".syncd/elsewhere",
)
LOOKS = 60


@contextlib.contextmanager
def somewhere():
    """Make a directory in memory if there is such a place: a million files are made."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.mkdtemp(prefix="large-", dir=place)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def fill(root, count):
    """Make a number of files below a job, a thousand in a directory."""
    for number in range(count):
        directory = f"{root}/{PLACES[number % len(PLACES)]}/{number // 1000}"
        if number % 1000 < len(PLACES):
            os.makedirs(directory, exist_ok=True)
        os.close(os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY))


def calls(*command):
    """Return how many system calls a command makes, all its threads together."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
        traced = ["strace", "-f", "-c", "-U", "calls,name", "-o", log.name, *command]
        done = subprocess.run(
            traced, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return sum(
            int(line.split()[0])
            for line in log
            if line.split()[-1:] != ["total"] and line[:6].strip().isdigit()
        )


@pytest.mark.usefixtures("strace_injection")
def test_the_cost_of_a_tick_does_not_depend_on_files_below_the_job(record_line):
    with somewhere() as place:
        looked, shown = {}, {}
        for count in (FEW, MANY):
            job = Job.at(f"{place}/{count}")
            os.mkdir(job.root)
            for step in (1, 2, 3):
                write_step(job, step, full=step == 1)
            fill(job.root, count)
            looked[count] = calls(*python(f"{PROGRAMS}/ticks.py", job.root, str(LOOKS)))
            shown[count] = calls(*syncd("status", job.root, "--json"))
            assert read_version(job).step == 3
            assert steps_of(job) == [1, 2, 3]
    record_line(
        f"{LOOKS} looks at a job with {FEW} and {MANY} files below it: {looked} system calls; status: {shown}"
    )
    # Start-up differs by a few calls. What a full checkpoint needs is found out once, by a call a file.
    once = (MANY - FEW) / len(PLACES)
    for found in (looked, shown):
        assert found[MANY] - found[FEW] < 1.3 * once + 500


class CountingDisk(LocalDisk):
    """Counts what is asked of the file system."""

    calls = 0

    def __getattribute__(self, name):
        if name in ("read", "read_at", "stat", "list", "refresh", "rename", "replace", "make_directory"):
            type(self).calls += 1
        return super().__getattribute__(name)


def test_a_jump_of_the_step_number_costs_as_much_as_one_step(tmp_path):
    job = Job.at(tmp_path, disk=CountingDisk())
    daemon, heard, clock = start(job, keep_last=2, keep_every=500, trash_grace=0)
    costs = []
    for step in (999, 1000, 1001, 100_000, 100_001, 2_000_000_000):
        write_step(job, step)
        clock.at += 1
        before = CountingDisk.calls
        daemon.tick(woken=True)
        costs.append(CountingDisk.calls - before)
        assert read_version(job).step == step
    assert max(costs[3:]) <= 2 * max(costs[1:3]), costs
    assert steps_of(job) == [1000, 100_000, 100_001, 2_000_000_000], "two, and multiples of 500"
    assert heard.of("operation_failed") == []


def test_presences_of_long_dead_explorers_are_removed(tmp_path):
    """An array of explorers that come and go, each under a name of its own, lasts for weeks."""
    job = Job.at(tmp_path)
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    here = explorer(job, clock, "stays")
    for number in range(100):
        explorer(job, clock, f"array-{number}", leases=(1,))
    daemon.tick()
    told = []

    def pass_by(seconds):
        ends = clock.at + seconds
        while clock.at < ends:
            clock.at = min(clock.at + 600, ends)
            here.update()
            daemon.tick()
            told.append(len(os.listdir(job.explorers)))

    clock.at += 10
    daemon.tick()
    pass_by(FORGET_AFTER - 1200)
    assert set(told) == {101}, "a day is not over"
    pass_by(2400)
    assert os.listdir(job.explorers) == ["stays.json"]
    assert heard.of("operation_failed") == []
    assert {event["explorer"] for event in heard.of("explorer_died")} == {f"array-{n}" for n in range(100)}


def test_presences_of_long_dead_explorers_are_removed_where_no_daemon_leads_for_a_day(tmp_path):
    """Under a limit of 12 hours each leader sees a silence of less than a day: the dates of the server say more."""
    job = Job.at(tmp_path)
    clock = ManualClock()
    explorers = {name: explorer(job, clock, name) for name in ("silent", "lately", "beats")}
    daemon, heard, _ = start(job, clock)

    def pass_by(seconds):
        for _ in range(seconds // 5):
            explorers["beats"].update()
            for name, hours in (("silent", 25), ("lately", 23), ("beats", 25)):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(f"{job.explorers}/{name}.json", (0, time.time() - hours * 3600))
            daemon.tick()
            clock.at += 5

    pass_by(60)
    assert len(os.listdir(job.explorers)) == 3, "a leader that has begun gives each its whole time"
    pass_by(130)
    assert sorted(os.listdir(job.explorers)) == ["beats.json", "lately.json"]
    assert heard.of("operation_failed") == []


def test_an_explorer_that_beats_again_during_its_removal_keeps_its_lease(tmp_path):
    class Late(LocalDisk):
        def rename(self, source, target):
            if source.endswith("/e0.json"):
                self.rename = super().rename
                reader.update(leases=(1,))
            super().rename(source, target)

    job = Job.at(tmp_path, disk=Late())
    daemon, _, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    reader = explorer(job, clock, "e0")
    daemon.tick()
    clock.at += 10
    daemon.tick()
    clock.at += FORGET_AFTER
    daemon.tick()
    found = read_presences(job.disk, job.explorers)[0]
    assert found["e0"].leases == (1,)
    assert found["e0"].beat == reader.presence.beat


def test_removed_damaged_steps_leave_no_entry_in_memory(tmp_path):
    job = Job.at(tmp_path)
    daemon, heard, clock = start(job, keep_last=1, partial_grace=10.0)
    for step in range(1, 40):
        write_step(job, step, announce=False)
        if step % 2:
            damage(f"{job.step(step)}/actor/model-00001-of-00001.safetensors")
        write_marker(job.disk, job.marker, step)
        clock.at += 20
        daemon.tick(woken=True)
    assert len(heard.of("step_damaged")) >= 15
    assert len(daemon._scanner.steps._rejected) <= 2


def damage(path):
    """Change the header of a file, not its size: only a look inside can tell."""
    with open(path, "r+b") as file:
        file.write(b"\xff" * 8)
