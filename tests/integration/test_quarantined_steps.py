"""Steps in which a daemon reads damage are put aside for every later daemon, and views show it."""

import pytest
from support.jobs import start, steps_of, write_step

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version, write_marker


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


def write_damaged(job, step):
    """Write a step whose shard has its size and no header, and return the bytes that repair it."""
    manifest = write_step(job, step, announce=False)
    path = f"{job.step(step)}/{manifest.shards[0].name}"
    with open(path, "r+b") as file:
        good = file.read(8)
        file.seek(0)
        file.write(b"\xff" * 8)
    write_marker(job.disk, job.marker, step)
    return path, good


def repair(path, good):
    with open(path, "r+b") as file:
        file.write(good)


@pytest.fixture
def damaged(job):
    """A job with step 1, published, and step 2, in which its daemon found damage; the daemon has ended since."""
    write_step(job, 1)
    daemon, heard, clock = start(job)
    daemon.tick(woken=True)
    path, good = write_damaged(job, 2)
    daemon.tick(woken=True)
    daemon.tick(woken=True)
    (event,) = heard.of("step_quarantined")
    assert (event["step"], read_version(job).pair) == (2, (1, 1))
    daemon.close()
    return job, clock, path, good


def test_a_damaged_step_is_not_published_by_a_later_daemon_either(damaged):
    job, clock, path, good = damaged
    repair(
        path, good
    )  # now it would pass: what one daemon has read twice counts until a person says otherwise
    daemon, heard, _ = start(job, clock)
    daemon.tick(woken=True)
    assert read_version(job).pair == (1, 1)
    assert heard.of("step_quarantined") == []
    assert heard.of("scan_completed")[-1]["quarantined"] == 1
    write_step(job, 3)
    daemon.tick(woken=True)
    found = read_version(job)
    assert (found.pair, [one.step for one in found.quarantine]) == ((1, 3), [2])


def test_status_and_ls_show_what_is_quarantined(damaged, shell):
    job = damaged[0]
    document = shell("status", job.root, "--json").document
    (entry,) = document["version"]["quarantine"]
    assert (entry["step"], entry["reason"][:8]) == (2, "damaged:")
    assert {"name": "quarantined_step", "detail": f"step 2: {entry['reason']}"} in document["problems"]
    checked = shell("status", job.root, "--check")
    assert (checked.code, checked.out.split()[-1]) == (1, "quarantined=1")
    assert "quarantined step 2: damaged:" in checked.out
    assert "quarantined step 2: damaged:" in shell("status", job.root).out
    rows = {row["step"]: row for row in shell("ls", job.root, "--json").document["steps"]}
    assert (rows[1]["quarantined"], rows[2]["quarantined"]) == (None, entry["reason"])
    assert "quarantined: damaged:" in shell("ls", job.root).out


def test_a_repaired_step_can_be_published_by_a_rollback(damaged, shell):
    job, _, path, good = damaged
    refused = shell("rollback", job.root, "2", "--timeout", "5")
    assert refused.code != 0
    assert read_version(job).pair == (1, 1)
    repair(path, good)
    assert shell("rollback", job.root, "2", "--timeout", "5").code == 0
    found = read_version(job)
    assert (found.pair, found.quarantine) == ((2, 2), ())


def test_a_step_that_is_written_again_is_published(damaged):
    job, clock, _, _ = damaged
    job.disk.rename(job.step(2), f"{job.root}/aside")
    write_step(job, 2, salt=9)
    daemon, _, _ = start(job, clock)
    daemon.tick(woken=True)
    assert (read_version(job).pair, read_version(job).quarantine) == ((1, 2), ())


def test_quarantined_steps_do_not_displace_good_ones(job):
    daemon, heard, clock = start(job, keep_last=2, trash_grace=0.0)
    for step in (1, 2):
        write_step(job, step)
        daemon.tick(woken=True)
    for step in (3, 4, 5):
        write_damaged(job, step)
        daemon.tick(woken=True)
    write_step(job, 6)
    daemon.tick(woken=True)
    clock.at += 4000.0
    daemon.tick(woken=True)
    daemon.tick(woken=True)
    assert steps_of(job) == [2, 6]
    assert read_version(job).pair == (1, 6)
    assert [entry.step for entry in read_version(job).quarantine] == [3, 4, 5]
    assert heard.of("scan_completed")[-1]["quarantined"] == 0, "an alert must end with the steps"
