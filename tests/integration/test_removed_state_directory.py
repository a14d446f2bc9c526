"""The state directory is removed under daemons that run: one leads again by itself, and nothing is lost."""

import contextlib
import shutil

import pytest
from support.jobs import explorer, start, steps_of, write_step

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


def pair(job):
    version = read_version(job)
    return version.pair if version else None


def ticks(daemon, clock, seconds, keep=lambda: None):
    """Let a daemon tick for a while, with somebody else's work before each tick."""
    for _ in range(int(seconds)):
        clock.at += 1
        keep()
        daemon.tick(woken=True)


def test_a_leader_leads_again_after_its_state_directory_was_removed(job):
    daemon, heard, clock = start(job, keep_last=2)
    for step in (1, 2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    shutil.rmtree(job.state)
    write_step(job, 4)
    ticks(daemon, clock, 5)
    assert pair(job) == (2, 4), "above what was published before"
    assert daemon.error is None
    assert heard.of("step_damaged") == []
    assert [event["term"] for event in heard.of("leadership_acquired")] == [1, 2]
    write_step(job, 5)
    ticks(daemon, clock, 1)
    assert pair(job) == (2, 5)


@pytest.mark.parametrize("verify", ["header", "content"])
def test_removing_the_state_directory_during_a_check_damages_no_step(job, verify):
    daemon, heard, clock = start(job, verify=verify)
    daemon.tick()
    write_step(job, 1, world_size=3)

    def remove():
        daemon.on_progress(lambda: None)
        shutil.rmtree(job.state)
        clock.at += 5  # a heartbeat is due at the next file

    daemon.on_progress(remove)
    ticks(daemon, clock, 3)
    assert heard.of("step_damaged") == []
    assert pair(job) == (1, 1)


def test_exactly_one_of_two_daemons_leads_after_a_removed_state_directory(job):
    first, _, clock = start(job)
    second, _, _ = start(job, clock)
    write_step(job, 1)
    first.tick(woken=True)
    second.tick()
    assert (first.leads, second.leads) == (True, False)
    shutil.rmtree(job.state)
    second.tick()
    assert second.leads, "the terms are gone, and so is who led"
    for step in range(2, 8):
        write_step(job, step)
        clock.at += 1
        for daemon in (first, second):
            daemon.tick(woken=True)
        assert pair(job) == (2, step), "the stand-by knew what its leader had published"
    assert (first.leads, second.leads) == (False, True)


def test_readers_keep_their_steps_after_a_removed_state_directory(job):
    daemon, _, clock = start(job, keep_last=1, ttl=20.0)
    reader = explorer(job, clock, leases=(1,))
    for step in (1, 2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    assert 1 in steps_of(job)
    shutil.rmtree(job.state)
    ticks(daemon, clock, 5)
    assert 1 in steps_of(job), "its reader has not written its lease again yet"

    def beat():
        with contextlib.suppress(FileNotFoundError):
            reader.beat()

    ticks(daemon, clock, 30, beat)
    assert 1 in steps_of(job)
    reader.update(leases=())
    ticks(daemon, clock, 8, beat)
    assert 1 not in steps_of(job)


def test_a_daemon_without_history_publishes_above_applied_versions(job):
    """The state directory was removed while no daemon ran: pairs begin again below what explorers have applied."""
    write_step(job, 7)
    daemon, _, clock = start(job)
    daemon.tick()
    assert pair(job) == (1, 7)
    explorer(job, clock, "e0", applied=(3, 7))
    ticks(daemon, clock, 10)
    assert pair(job) == (4, 7)
    write_step(job, 8)
    ticks(daemon, clock, 1)
    assert pair(job) == (4, 8)
