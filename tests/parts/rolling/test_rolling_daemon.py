"""The daemon's own part of a wave: whom it may choose, tick by tick on a clock that is moved by hand."""

import pytest
from support.jobs import explorer, start, write_step

from syncd.config import DaemonConfig
from syncd.observe import event_names
from syncd.parts.rolling.admit import Policy
from syncd.parts.rolling.daemon import OFF_AFTER
from syncd.protocol.layout import Job
from syncd.protocol.rolling import READS_GATE, read_wave


@pytest.fixture
def job(tmp_path):
    return Job.at(str(tmp_path))


def led(job):
    daemon, _, clock = start(job, parts={"rolling": Policy(max_paused=2, canaries=1)})
    explorer(job, clock, "e3", reads=(READS_GATE,))
    daemon.tick()
    clock.sleep(1.0)
    return daemon, clock


def canaries(job):
    wave = read_wave(job)
    return None if wave is None else list(wave.admitted)


def test_a_canary_is_chosen_of_those_that_are_there_when_the_version_is_published(job):
    daemon, clock = led(job)
    explorer(job, clock, "e0", reads=(READS_GATE,))  # the daemon would not read of it for 4 s
    write_step(job, 1)
    daemon.tick(woken=True)
    assert daemon.snapshot.version.pair == (1, 1)
    assert canaries(job) == []
    clock.sleep(daemon.parts.every)
    daemon.tick()
    assert canaries(job) == ["e0"]
    assert daemon.parts.every == 0.5, "while a canary tests, presences are read twice a second"


def test_a_version_that_a_new_leader_finds_waits_for_no_further_reading(job):
    daemon, _ = led(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    daemon.close()
    daemon, _ = led(job)
    assert canaries(job) == ["e3"]


def test_explorers_that_cannot_be_listed_are_not_waited_for(job, monkeypatch):
    daemon, clock = led(job)
    write_step(job, 1)
    listed = job.disk.list

    def fail(path):
        if path == job.explorers:
            raise OSError(5, "Input/output error", path)
        return listed(path)

    monkeypatch.setattr(job.disk, "list", fail)
    daemon.tick(woken=True)
    for _ in range(3):
        clock.sleep(daemon.parts.every)
        daemon.tick()
    assert canaries(job) == ["e3"]


def test_a_canary_waits_no_longer_than_a_second_for_presences(job, monkeypatch):
    daemon, clock = led(job)
    write_step(job, 1)
    monkeypatch.setattr(daemon._scanner._modules, "is_due", lambda now: False)
    daemon.tick(woken=True)
    for _ in range(49):
        clock.sleep(daemon.parts.every)
        daemon.tick()
    assert canaries(job) == []
    clock.sleep(daemon.parts.every * 2)
    daemon.tick()
    assert canaries(job) == ["e3"]


def test_the_counts_of_a_wave_are_none_once_rolling_updates_are_off(job):
    daemon, heard, clock = start(job, parts={"rolling": Policy(max_paused=2, canaries=1)})
    explorer(job, clock, "e0", reads=(READS_GATE,))
    write_step(job, 1)
    for _ in range(3):
        daemon.tick()
        clock.sleep(6)
    assert canaries(job) == ["e0"]
    daemon.reload(DaemonConfig(verify="header"))
    daemon.tick()
    clock.sleep(OFF_AFTER)
    daemon.tick()
    assert read_wave(job) is None
    assert heard.of(event_names.WAVE_PROGRESSED)[-1] == dict.fromkeys(
        ("admitted", "slots", "waiting", "stopped"), 0
    )
