"""Six real followers and a daemon, each a process: waves, kill -9 of each, a bad version, a shared stage."""

import json
import time

import pytest
from support.rolling_fleet import TABLE, FleetOfProcesses, lead, process, read_log

from syncd.protocol.rolling import read_wave
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.group("rolling_fleet")]


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
    assert len(fleet.loaders(bad, generation=2)) == 1, "what the first canary gave up is tested again"
    assert len(fleet.loaders(bad)) <= 2
    fleet.reaches((1, good))


def test_the_next_version_goes_its_way_after_one_that_was_stopped(fleet):
    step = fleet.publish()
    fleet.reaches((2, step))
    assert fleet.syncd("rolling", fleet.root, "--resume").returncode == 3
    assert fleet.most_paused() <= TABLE["max_paused"]
