"""Thousands of explorers: how often their presences are read and parsed, and that no lease is missed for it."""

import itertools

import pytest
from support.jobs import explorer, start, steps_of, write_step

from syncd.protocol import presence
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import Presences

EXPLORERS = 50


class Watched(LocalDisk):
    """A disk that counts what is read of presences, and lets something happen after a rename."""

    def __init__(self):
        self.reads, self.after_rename = 0, {}

    def read(self, path, limit=1 << 24):
        self.reads += "/explorers/" in path
        return super().read(path, limit)

    def rename(self, source, target):
        super().rename(source, target)
        self.after_rename.pop(source.rpartition("/")[2], lambda: None)()


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path, disk=Watched())


def crowd(job, clock, count=EXPLORERS):
    return [explorer(job, clock, f"e{number}") for number in range(count)]


def led(job, steps):
    """Return a daemon that has published, and will remove all steps but the newest at its next tick."""
    daemon, heard, clock = start(job, keep_last=1, prune=False)
    explorers = crowd(job, clock)
    for step in steps:
        write_step(job, step)
    daemon.tick(woken=True)
    daemon.reload(type(daemon.config)(keep_last=1))
    return daemon, heard, explorers


def test_many_removals_read_presences_twice_and_parse_changes_once(job, monkeypatch):
    daemon, heard, explorers = led(job, range(1, 8))
    parsed, real = [], presence.decode_presence
    monkeypatch.setattr(
        presence, "decode_presence", lambda data, path: parsed.append(path) or real(data, path)
    )
    explorers[3].update(leases=(2,))
    before = job.disk.reads
    daemon.tick()
    assert [told["step"] for told in heard.of("step_pruned")] == [1, 3, 4, 5, 6]
    assert job.disk.reads - before == 2 * EXPLORERS
    assert parsed == [f"{job.explorers}/e3.json"], "of the others the bytes are the same"


def test_all_that_is_deleted_at_once_costs_one_reading_of_presences(job):
    daemon, heard, clock = start(job, keep_last=1, trash_grace=5.0)
    crowd(job, clock)
    for step in range(1, 8):
        write_step(job, step)
    daemon.tick(woken=True)
    clock.at += 6
    before = job.disk.reads
    daemon.tick()
    assert heard.of("trash_emptied")[-1]["entries"] == 6
    assert job.disk.reads - before == 2 * EXPLORERS, "once by the scan"


def test_a_lease_written_during_any_of_many_removals_keeps_its_step(job):
    """A reader wrote its lease and found the manifest, at the last moment before the rename or among later ones."""
    daemon, _, explorers = led(job, range(1, 8))
    job.disk.after_rename = {
        "global_step_1": lambda: explorers[0].update(leases=(1,)),
        "global_step_2": lambda: explorers[1].update(leases=(4,)),
        "global_step_5": lambda: explorers[2].update(leases=(2,)),
    }
    daemon.tick()
    assert daemon.error is None
    assert steps_of(job) == [1, 2, 4, 7]
    for step in steps_of(job):
        assert job.disk.stat(f"{job.step(step)}/manifest.json").kind == "file"


def test_a_presence_replaced_by_one_of_the_same_size_is_read(job):
    """Also where the file system gives it the inode and the date of the one before."""
    _, _, clock = start(job)
    reader, files = explorer(job, clock, "e0", leases=(1,)), Presences(job.disk)
    for step in (1, 2, 3, 4):
        reader.update(leases=(step,))
        assert files.read(job.explorers)[0]["e0"].leases == (step,)


def test_a_new_step_does_not_wait_for_presences_to_be_read(job):
    daemon, _, clock = start(job, prune=False, reconcile=1000.0)
    crowd(job, clock)
    write_step(job, 1)
    daemon.tick(woken=True)

    def reads(step, after):
        clock.at += after
        if step:
            write_step(job, step)
        before = job.disk.reads
        daemon.tick(woken=True)
        return job.disk.reads - before, daemon.snapshot.version.step

    assert reads(2, 6) == (0, 2), "they are due"
    assert reads(None, 0) == (EXPLORERS, 2)
    assert reads(3, 11) == (EXPLORERS, 3), "they are late, and each scan may find a new step"


def test_a_leader_beats_while_it_reads_presences_on_a_slow_mount(job):
    """A stand-by would depose it, read them as slowly, and be deposed in turn."""
    daemon, heard, clock = start(job, keep_last=1, trash_grace=1000.0)
    daemon.tick()
    crowd(job, clock)
    standby, _, _ = start(Job.at(job.root), clock)
    for step in range(1, 8):
        write_step(job, step)
    real = job.disk.read

    def slow(path, *limit):
        if "/explorers/" in path:
            clock.at += 0.5
            standby.tick()
        return real(path, *limit)

    job.disk.read = slow
    for _ in range(3):
        daemon.tick()
        clock.at += 6
    assert (daemon.leads, standby.leads, daemon.error) == (True, False, None)
    assert len(heard.of("step_pruned")) == 6


def test_slow_reads_of_presences_are_made_less_often(job):
    daemon, _, clock = start(job)
    (publisher,) = crowd(job, clock, 1)
    real, readings = job.disk.list, []

    def slow(path):
        if path == job.explorers:
            readings.append(clock.at)
            clock.at += 0.5
        return real(path)

    job.disk.list = slow
    for _ in range(45):
        daemon.tick()
        publisher.beat()
        clock.at += 1.0
    gaps = [after - before for before, after in itertools.pairwise(readings[2:])]
    assert min(gaps) >= 9.5
    assert max(gaps) <= 15.0 + 2.0
    assert daemon.snapshot.explorers["e0"].alive
