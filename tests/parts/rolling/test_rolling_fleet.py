"""Six real followers and a daemon, each a process: waves, kill -9 of each, a bad version, a shared stage."""

import hashlib
import json
import subprocess
import sys
import time

import pytest
from support.fake_hook import logprobs_of
from support.jobs import write_step
from support.rolling_fleet import follow, lead, process, read_log

from syncd.protocol.layout import Job
from syncd.protocol.presence import read_presences
from syncd.protocol.probe import Probe
from syncd.protocol.rolling import read_wave
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.group("rolling_fleet")]

NAMES = [f"e{number}" for number in range(6)]
TABLE = {"max_paused": 2, "canaries": 1, "patience": 60.0}
LONG = 240.0
LOAD = 0.3
TOKENS = ((5, 6, 7), (8, 9))


class FleetOfProcesses:
    """The job, its processes, and what the engines have said."""

    def __init__(self, root):
        self.root, self.log, self.stage = str(root / "job"), str(root / "log"), str(root / "stage")
        (root / "job").mkdir()
        (root / "stage").mkdir(mode=0o700)
        self.job, self.killed, self.step = Job.at(self.root), [], 0
        self.daemon = process(lead, self.root, TABLE)
        self.followers = {name: self.follower(name) for name in NAMES}

    def follower(self, name):
        return process(follow, self.root, name, self.log, LOAD, self.stage)

    def publish(self, *, garbled=False):
        """Write a step; a garbled one has other tensors than those that its probe was made with."""
        self.step += 1
        meant = (lambda content: content[:-4] + b"\0\0\0\0") if garbled else (lambda content: content)
        answer = lambda content: logprobs_of(hashlib.sha256(meant(content)).hexdigest(), TOKENS)  # noqa: E731
        write_step(
            self.job, self.step, probe=lambda content: Probe(TOKENS, answer(content), "float32", "float32")
        )
        return self.step

    def running(self):
        presences = read_presences(self.job.disk, self.job.explorers)[0]
        return {name: presences[name].applied for name in NAMES if name in presences}

    def reaches(self, pair, names=NAMES):
        self.until(lambda: {self.running().get(name) for name in names} == {pair}, f"{names} run {pair}")

    def until(self, holds, what):
        ends = time.monotonic() + LONG
        while not holds():
            assert time.monotonic() < ends, (
                f"{what}: {self.running()}, {read_wave(self.job)}, {read_log(self.log)[-12:]}"
            )
            time.sleep(0.05)

    def kill(self, name):
        """End a follower and its engine at once, and start another."""
        self.followers[name].kill()
        self.followers[name].join()
        self.killed.append((name, time.monotonic()))
        self.followers[name] = self.follower(name)

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.join()

    def most_paused(self):
        """Return how many engines that had served were paused at once."""
        lines = [(line["at"], line["engine"], line["what"]) for line in read_log(self.log)]
        lines += [(at, name, "killed") for name, at in self.killed]
        paused, most = set(), 0
        for _, name, what in sorted(lines):
            paused = paused | {name} if what == "pause" else paused - {name}
            most = max(most, len(paused))
        return most

    def loaders(self, step):
        """Return the engines that have begun to load a step, in any generation."""
        loads = [line for line in read_log(self.log) if line["what"] in ("pause", "start")]
        return {line["engine"] for line in loads if line["label"].split(".")[1] == str(step)}

    def syncd(self, *arguments):
        command = [sys.executable, "-P", "-m", "syncd", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)

    def close(self):
        for made in (self.daemon, *self.followers.values()):
            made.kill()
            made.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = FleetOfProcesses(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


def test_versions_reach_all_and_never_more_than_two_pause(fleet):
    for _ in range(3):
        step = fleet.publish()
        fleet.reaches((1, step))
    assert 1 <= fleet.most_paused() <= TABLE["max_paused"]


def test_only_the_canary_loads_a_version_before_it_is_shown_to_be_good(fleet):
    step = fleet.publish()
    fleet.reaches((1, step))
    of_step = [line for line in read_log(fleet.log) if (line["label"] or "").startswith(f"1.{step}.")]
    assert [line["what"] for line in of_step[:2]] == ["pause", "serve"], of_step
    assert of_step[0]["engine"] == of_step[1]["engine"]


def test_a_follower_that_is_killed_in_the_middle_of_a_wave_does_not_stop_it(fleet):
    step = fleet.publish()
    fleet.until(lambda: fleet.loaders(step), "somebody loads it")
    fleet.kill(min(fleet.loaders(step)))
    fleet.kill("e5")
    fleet.reaches((1, step))
    assert fleet.most_paused() <= TABLE["max_paused"]


def test_a_daemon_that_is_killed_in_the_middle_of_a_wave_is_replaced_and_the_wave_goes_on(fleet):
    step = fleet.publish()
    fleet.until(lambda: fleet.loaders(step), "somebody loads it")
    term = read_wave(fleet.job).term
    fleet.kill_daemon()
    fleet.daemon = process(lead, fleet.root, TABLE)
    fleet.reaches((1, step))
    fleet.until(lambda: read_wave(fleet.job).term > term, "the next daemon writes the wave")
    assert fleet.most_paused() <= TABLE["max_paused"]


def test_a_bad_version_reaches_one_engine_of_six_and_can_be_tried_again(fleet):
    good = fleet.step
    bad = fleet.publish(garbled=True)
    fleet.until(lambda: read_wave(fleet.job).phase == "stopped", "canaries stop it")
    fleet.until(lambda: read_version(fleet.job).quarantine, "it is in quarantine")
    time.sleep(1.0)
    assert len(fleet.loaders(bad)) == 1
    fleet.reaches((1, good))
    shown = json.loads(fleet.syncd("status", fleet.root, "--json").stdout)
    assert shown["rolling"]["phase"] == "stopped"
    assert "rolling_stopped" in [item["name"] for item in shown["problems"]]
    again = fleet.syncd("rolling", fleet.root, "--resume")
    assert again.returncode == 0, again.stderr
    fleet.until(lambda: (2, bad) in read_wave(fleet.job).stopped_pairs, "canaries stop it again")
    assert len(fleet.loaders(bad)) <= 2
    fleet.reaches((1, good))


def test_the_next_version_goes_its_way_after_one_that_was_stopped(fleet):
    step = fleet.publish()
    fleet.reaches((2, step))
    assert fleet.syncd("rolling", fleet.root, "--resume").returncode == 3
    assert fleet.most_paused() <= TABLE["max_paused"]
