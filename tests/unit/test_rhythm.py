"""How often to look for a version, on times made by hand, and how changed names are seen."""

import os

import pytest
from support.jobs import ManualClock, write_step

from syncd.client.rhythm import FRACTION, GROWING, QUICK, NameChanges, Rhythm, VersionLookout, look_after
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import Version

POLL = 0.25
STEADY = [10.0 * number for number in range(9)]  # the last at 80


def test_without_history_and_without_a_step_each_look_is_a_poll():
    assert look_after(100.0, [], None, POLL) == POLL
    assert look_after(100.0, [50.0], None, POLL) == POLL


@pytest.mark.parametrize("arrivals", [[], [50.0], STEADY])
def test_while_a_step_changes_looks_are_quick_whatever_the_history(arrivals):
    assert look_after(100.0, arrivals, 99.9, POLL) == QUICK
    assert look_after(100.0, arrivals, 100.0 - GROWING, POLL) == POLL, (
        "a dead attempt costs no quick looks for ever"
    )


def test_looks_are_quick_from_shortly_before_a_version_is_due_until_it_is_late():
    assert look_after(82.0, STEADY, None, POLL) == POLL
    assert look_after(87.9, STEADY, None, POLL) == pytest.approx(0.1), (
        "a pause ends when the version may come"
    )
    assert look_after(88.0, STEADY, None, POLL) == QUICK
    assert look_after(92.4, STEADY, None, POLL) == QUICK
    assert look_after(92.6, STEADY, None, POLL) == POLL, "the trainer has stopped or does something else"


def test_one_early_version_does_not_make_all_looks_quick():
    arrivals = [0.0, 10.0, 20.0, 30.0, 30.5, 40.0]
    assert look_after(43.0, arrivals, None, POLL) == POLL
    assert look_after(48.1, arrivals, None, POLL) == QUICK


def test_after_one_late_version_the_next_may_be_as_late():
    arrivals = [0.0, 10.0, 20.0, 60.0, 70.0]
    assert look_after(90.0, arrivals, None, POLL) == QUICK
    assert look_after(70.0 + 1.25 * 40 + 0.1, arrivals, None, POLL) == POLL


@pytest.mark.parametrize(("interval", "seconds"), [(1.0, QUICK), (60.0, 60.0 / FRACTION), (3600.0, POLL)])
def test_rare_versions_are_looked_for_less_often(interval, seconds):
    assert look_after(3 * interval, [0.0, interval, 2 * interval], None, POLL) == pytest.approx(seconds)


def test_a_short_poll_stays_as_short_as_it_is():
    assert look_after(100.0, STEADY, 99.9, 0.005) == 0.005
    assert look_after(90.0, STEADY, None, 0.005) == 0.005


def test_a_step_is_near_while_it_grows_and_until_it_is_published():
    rhythm = Rhythm()
    rhythm.note_unpublished(0.0, [("attempt", 10)])
    assert rhythm.look_after(GROWING - 1, POLL) == QUICK
    rhythm.note_unpublished(GROWING - 1, [("attempt", 20)])
    assert rhythm.look_after(2 * GROWING - 2, POLL) == QUICK, "it has grown"
    rhythm.note_unpublished(2 * GROWING - 2, [("attempt", 20)])
    assert rhythm.look_after(2 * GROWING, POLL) == POLL, "it has not"
    rhythm.note_unpublished(2 * GROWING, [("step", 20)])
    assert rhythm.look_after(2 * GROWING, POLL) == QUICK, "it was sealed"
    rhythm.note_unpublished(2 * GROWING, [])
    assert rhythm.look_after(2 * GROWING, POLL) == POLL, "it was published"


def test_the_rhythm_is_that_of_the_last_versions_only():
    rhythm = Rhythm()
    for number in range(100):
        rhythm.note_version(float(number))
    for number in range(1, 10):
        rhythm.note_version(99.0 + 10 * number)
    assert rhythm.look_after(189.0 + 5, POLL) == POLL
    assert rhythm.look_after(189.0 + 9, POLL) == QUICK


def test_a_change_of_names_is_told_twice_then_no_more(tmp_path):
    names = NameChanges(LocalDisk(), str(tmp_path))
    while names.look():
        pass
    (tmp_path / "new").touch()
    assert [names.look() for _ in range(4)] == [True, True, False, False]
    os.replace(tmp_path / "new", tmp_path / "newer")
    assert names.look()


class Lookout:
    """A lookout of a real job on a clock that sleeping moves; `at_sleep` says what happens in a sleep."""

    def __init__(self, path):
        self.job, self.clock, self.sleeps, self.happens = Job.at(path), ManualClock(), [], []
        os.makedirs(self.job.state)
        self.made = VersionLookout(self.job, self.clock)
        self.drain()

    def drain(self):
        for _ in range(3):
            self.wait()

    def wait(self):
        self.sleeps = []
        self.made.wait(POLL, self.sleep)
        return self.sleeps

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.clock.sleep(seconds)
        if self.happens:
            self.happens.pop(0)()


@pytest.fixture
def lookout(tmp_path):
    return Lookout(tmp_path)


def test_a_lookout_sleeps_a_whole_poll_while_nothing_is_near(lookout):
    assert lookout.wait() == [POLL]


def test_a_lookout_looks_often_while_an_attempt_is_there_and_ends_with_the_version(lookout):
    os.mkdir(f"{lookout.job.root}/.global_step_7.attempt-a")
    lookout.happens = [lambda: None] * 3 + [lambda: lookout.job.disk.replace(lookout.job.version, b"{}")]
    assert lookout.wait() == [QUICK] * 4


def test_a_lookout_rests_once_the_step_is_published(lookout):
    manifest = write_step(lookout.job, 7)
    assert lookout.wait()[0] == QUICK
    lookout.made.note(Version(1, 7, "weights", "global_step_7/actor", manifest.digest))
    assert lookout.wait() == [POLL]


def test_a_lookout_of_a_missing_job_sleeps(tmp_path):
    lookout = Lookout(tmp_path / "job")
    os.rmdir(lookout.job.state)
    os.rmdir(lookout.job.root)
    assert lookout.wait() == [POLL]
