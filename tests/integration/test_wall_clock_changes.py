"""A wall clock that is set by days while everything runs: dates change, nobody dies, nothing waits, nothing goes."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys

import pytest
from beds.probe import BEDS
from programs.light_engine import read_journal
from support import checker
from support.jobs import ManualClock, explorer, start, steps_of, write_step
from support.sweep import ENVIRONMENT
from support.waiting import until

from syncd.protocol.layout import Job
from syncd.protocol.presence import read_presences
from syncd.protocol.version import read_version

DAY = 86400
LONG = 60.0
STEPS = (5 * DAY, -10 * DAY, 30 * DAY, 0)


class SetClock(ManualClock):
    """A clock whose date can be set; durations know nothing of it."""

    skew = 0.0

    def time(self):
        return super().time() + self.skew


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.mark.parametrize("days", [5, -5, 400, -400])
def test_leader_explorer_and_lease_survive_a_changed_wall_clock(job, days):
    clock = SetClock()
    daemon, heard, _ = start(job, clock, keep_last=1, trash_grace=30, ttl=60)
    standby, told, _ = start(job, clock)
    write_step(job, 1)
    daemon.tick(woken=True)
    reader = explorer(job, clock)
    reader.update(leases=(1,))
    for step in range(2, 5):
        write_step(job, step)
        daemon.tick(woken=True)
    clock.skew = days * DAY
    for _ in range(20):
        clock.at += 5
        reader.beat()
        daemon.tick()
        standby.tick()
    write_step(job, 5)
    daemon.tick(woken=True)
    assert read_version(job).pair == (1, 5)
    assert 1 in steps_of(job), "its lease holds"
    assert daemon.leads
    assert not standby.leads
    assert {"explorer_died", "leadership_lost", "operation_failed"}.isdisjoint(heard.names() + told.names())
    assert all(event.get("latency", 0.0) >= 0 for event in heard.of("version_published"))


def test_grace_periods_do_not_depend_on_the_wall_clock(job):
    clock = SetClock()
    daemon, heard, _ = start(job, clock, keep_last=1, trash_grace=30)
    for step in (1, 2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    removed = heard.of("step_pruned")
    clock.skew = 10 * DAY
    clock.at += 10
    daemon.tick()
    assert [event["step"] for event in removed] == [1]
    assert heard.of("trash_emptied") == [], "it was not yet there for 30 s"
    clock.skew = -10 * DAY
    clock.at += 30
    daemon.tick()
    assert [event["entries"] for event in heard.of("trash_emptied")] == [1]


@pytest.fixture(scope="module")
def skewing(tmp_path_factory):
    """Return a library that sets the wall clock of what it is loaded into."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the date of a process cannot be set apart from that of the machine")
    library = str(tmp_path_factory.mktemp("skew") / "skew.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, f"{BEDS}/skew.c"], check=True)
    return library


class Skewed:
    """Real processes whose wall clock is set by a file."""

    def __init__(self, library, place, stack):
        self._file, self._place, self._stack = f"{place}/skew", place, stack
        with open(self._file, "wb") as file:
            file.write(struct.pack("<q", 0))
        self._environment = ENVIRONMENT | {"LD_PRELOAD": library, "SYNCD_SKEW": self._file}
        self.log = f"{place}/daemon.log"

    def set(self, seconds):
        with open(self._file, "r+b") as file:
            file.write(struct.pack("<q", seconds))

    def run(self, log, *argv):
        with open(log, "wb") as output:
            made = subprocess.Popen(
                [sys.executable, *argv], stdout=output, stderr=output, env=self._environment
            )
        self._stack.callback(made.wait, LONG)
        self._stack.callback(made.kill)
        return made

    def events(self):
        with open(self.log, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.startswith("{") and line.endswith("\n")]


def test_real_processes_survive_a_wall_clock_set_by_days(skewing, job, tmp_path):
    with contextlib.ExitStack() as stack:
        parts, journal = Skewed(skewing, tmp_path, stack), f"{tmp_path}/e0.journal"
        daemon = parts.run(parts.log, "-m", "syncd", "watch", job.root, "--trash-grace", "0", "--ttl", "10")
        programs = os.path.join(os.path.dirname(BEDS), "programs")
        follower = (f"{programs}/soak_explorer.py", job.root, "e0", journal, "--ttl", "10")
        parts.run(f"{tmp_path}/e0.log", *follower)

        def follows(step):
            write_step(job, step)
            until(lambda: runs() == step, lambda: f"{parts.events()[-5:]} {read_journal(journal)}")

        def runs():
            applied = [one.applied for one in read_presences(job.disk, job.explorers)[0].values()]
            return applied[0][1] if applied and applied[0] else None

        follows(1)
        for number, seconds in enumerate(STEPS, start=2):
            parts.set(seconds)
            follows(number)
        dates = [event["timestamp"] for event in parts.events()]
        assert dates != sorted(dates), "their date really was set"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(LONG) == 0
        names = {event["event"] for event in parts.events()}
        assert names.isdisjoint(
            {"explorer_died", "explorer_left", "leadership_lost", "standby_started", "operation_failed"}
        )
        assert checker.pair(job.root) == (1, len(STEPS) + 1)
        assert {line["event"] for line in read_journal(journal)} == {"runs"}
