"""Two daemons: the leader is killed, or stopped, while it publishes or removes; the stand-by takes over."""

import contextlib
import json
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import checker
from support.processes import (
    LEASED,
    NEXT,
    PAST,
    PROGRAMS,
    PUBLISHED,
    copy_of,
    daemon,
    damaged,
    lease,
    must,
    unequal,
    write_steps,
)
from support.sweep import ENVIRONMENT, Target, copied, python, run

pytestmark = pytest.mark.sweep

PATIENCE = 120.0
TAKEOVER = 10
"""Seconds of silence after which a leader is replaced: more than a loaded machine keeps a living one from ticking."""


class Process:
    """A daemon that runs, and what it has said so far."""

    def __init__(self, command, log):
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(command, stderr=file, stdout=file, env=ENVIRONMENT)

    def events(self):
        """Return the names of the events it has told, in order."""
        with open(self._log, encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.startswith("{") and line.endswith("}\n")]
        return [json.loads(line)["event"] for line in lines]

    def wait_for(self, event):
        wait_until(lambda: event in self.events() or self.has_ended(), f"{event} in {self._log}")

    def has_ended(self):
        return self._process.poll() is not None

    def has_fallen(self):
        """Say whether it is dead or stopped."""
        if self.has_ended():
            return True
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def end(self):
        """Stop it as systemd would, and return its exit status."""
        if not self.has_ended():
            self._process.send_signal(signal.SIGTERM)
            self.resume()
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def said(self):
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:]


class Pairs:
    """Reads the version all the time, and keeps every pair that it saw in the order of seeing."""

    def __init__(self, job):
        self._job, self._stop, self.seen = job, threading.Event(), []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        while not self._stop.wait(0.005):
            with contextlib.suppress(FileNotFoundError):
                pair = checker.pair(self._job)
                if pair and (not self.seen or self.seen[-1] != pair):
                    self.seen.append(pair)

    def end(self):
        self._stop.set()
        self._thread.join()
        return [f"the version went back: {self.seen}"] if self.seen != sorted(self.seen) else []


def wait_until(condition, what):
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.02)


# Where a leader falls, by what it renames; the second version is the one that it publishes while a stand-by
# watches it.
PLACES = {
    "before its version": ("before", ".syncd/version.json", "2"),
    "after its version": ("after", ".syncd/version.json", "2"),
    "before it removes a step": ("before", f"/global_step_{PUBLISHED}", "1"),
    "after it removed a step": ("after", f"/global_step_{PUBLISHED}", "1"),
}
FALLS = ("KILL", "STOP")


def falling(place, fall, command):
    """Return the command of a daemon that falls at a place."""
    return python(f"{PROGRAMS}/falling.py", *place, fall, *command[2:])


def take_over(start, place, fall):
    """Let a leader fall over a copy of a job while a stand-by watches; return what went wrong."""
    with copied(Target("", copy_of(start), lambda _: [], lambda *_: [], lambda _: [])) as (job, log):
        pairs = Pairs(job)
        leader = Process(falling(PLACES[place], fall, daemon(job, takeover=TAKEOVER)), f"{log}.leader")
        leader.wait_for("version_published")
        standby = Process(daemon(job, takeover=TAKEOVER), f"{log}.standby")
        try:
            standby.wait_for("standby_started")
            must(write_steps(job, NEXT, NEXT + 1))
            wait_until(leader.has_fallen, "the leader's fall")
            standby.wait_for("leadership_acquired")
            wait_until(lambda: checker.pair(job) == (1, NEXT + 1), "the newest version")
            if fall == "STOP":
                leader.resume()
                leader.wait_for("leadership_lost")
        finally:
            statuses = leader.end(), standby.end()
            wrong = pairs.end()
        wrong += checker.problems(job, PAST) + damaged(job, LEASED, NEXT + 1)
        wrong += unequal("what the two ended with", statuses, (0 if fall == "STOP" else -signal.SIGKILL, 0))
        return [f"{place}, {fall}: {problem}\n{leader.said()}\n{standby.said()}" for problem in wrong]


def test_a_standby_takes_over_and_fences_a_killed_or_suspended_leader(busy, record_line):
    cases = [(place, fall) for place in PLACES for fall in FALLS]
    with ThreadPoolExecutor(len(cases) // 2) as pool:  # they mostly wait
        wrong = [
            problem for found in pool.map(lambda case: take_over(busy, *case), cases) for problem in found
        ]
    record_line(f"take-over: {len(cases)} falls of a leader under a watching stand-by, {len(wrong)} problems")
    assert not wrong, "\n".join(wrong)


@pytest.mark.fault("a step is pruned while it is read")
def test_a_step_leased_during_an_unfinished_removal_is_restored(busy, tmp_path):
    job, step = str(tmp_path), PUBLISHED + 1
    copy_of(busy)(job)
    # The leader dies after its rename; the reader had written its lease and seen the manifest just before that.
    died = run(falling(("after", f"/global_step_{step}", "1"), "KILL", daemon(job, "--once")))
    assert died.returncode == -signal.SIGKILL
    assert step not in checker.steps(job)
    lease(job, "late", step)
    must(daemon(job, "--once"))
    assert not damaged(job, step)
    lease(job, "late")
    must(daemon(job, "--once"))
    assert step not in checker.steps(job)
