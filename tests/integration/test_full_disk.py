"""A daemon on a disk without room makes room by itself, also as the successor of one that was killed there."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from beds import probe
from support.cli import command, environment
from support.jobs import explorer, start, steps_of, write_step
from support.waiting import until

from syncd.daemon.trash import put_back
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.request import Pin, remove_pin, write_pin
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import read_version

pytestmark = pytest.mark.group("mounts")

SIZE = "size=8m"
MIB = 1 << 20


@pytest.fixture
def job(tmp_path):
    """Return a job on a file system of 8 MiB."""
    if (reason := probe.tmpfs(SIZE)) is not None:
        pytest.skip(reason)
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", SIZE, "tmpfs", point], check=True, timeout=60)
    try:
        (point / "job").mkdir()
        yield Job.at(point / "job")
    finally:
        subprocess.run(["umount", "-l", point], check=True, timeout=60)


def write(job, step):
    """Write a step of a mebibyte and a bit."""
    write_step(job, step)
    Path(f"{job.step(step)}/optimizer").write_bytes(bytes(MIB))


def fill(job):
    """Leave no room at all."""
    with open(f"{job.root}/../filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(job.root).f_bavail == 0


def killed_with_a_full_trash(job):
    """Have a real daemon publish three steps and remove the first, then kill it."""
    options = ("--keep-last", 1, "--trash-grace", 3600)
    with subprocess.Popen(
        command("watch", job.root, *options), stderr=subprocess.DEVNULL, env=environment()
    ) as daemon:
        try:
            for step in (1, 2, 3):
                write(job, step)
                until(lambda step=step: (found := read_version(job)) and found.step == step)
            until(lambda: steps_of(job) == [2, 3])
        finally:
            daemon.send_signal(signal.SIGKILL)
    (claim,) = os.listdir(f"{job.trash}/0000000001")
    return f"{job.trash}/0000000001/{claim}"


def test_the_successor_of_a_killed_daemon_empties_the_trash_and_leads(job):
    trash = killed_with_a_full_trash(job)
    write(job, 4)
    fill(job)
    daemon, _, clock = start(job, keep_last=1, trash_grace=30)
    daemon.tick()
    assert (daemon.trouble.state, daemon.leads) == ("full", False)
    clock.at += 20
    daemon.tick()
    assert len(os.listdir(trash)) == 1, "what was removed stays for its whole grace"
    for _ in range(3):
        clock.at += 20
        daemon.tick()
    assert (daemon.trouble, daemon.leads) == (None, True)
    assert read_version(job).step == 4


def test_a_leased_step_is_restored_from_the_trash_of_a_dead_daemon(job):
    trash = killed_with_a_full_trash(job)
    reader = explorer(job, SystemClock(), "reader", leases=(1,))
    fill(job)
    daemon, _, clock = start(job, keep_last=1, trash_grace=30)
    for _ in range(4):
        daemon.tick()
        clock.at += 20
    assert os.listdir(trash) == []
    assert steps_of(job) == [1, 2, 3]
    assert os.path.getsize(f"{job.step(1)}/optimizer") == MIB
    assert reader.presence.leases == (1,)


def test_a_leader_that_was_only_silent_never_restores_a_partial_step(job):
    """A candidate takes it for dead, and deletes from its trash, while it is between two calls."""
    first, _, clock = start(job, keep_last=1, trash_grace=30)
    for step in (1, 2, 3):
        write(job, step)
        first.tick(woken=True)
    (entry,) = os.listdir(first.leader.term.trash)
    fill(job)
    second, _, _ = start(job, clock=clock, keep_last=1, trash_grace=30)
    second.leader._candidate = Candidate(job, clock, 15.0, gone=lambda _: True)
    for _ in range(2):
        second.tick()  # finds no room for a claim, then looks at the trash
    clock.at += 40
    real, seen = job.disk.unlink, []

    def unlink(path):
        seen.append(put_back(job, f"{first.leader.term.trash}/{entry}", "global_step_1"))
        real(path)

    object.__setattr__(job.disk, "unlink", unlink)
    second.tick()
    assert seen
    assert not any(seen)
    assert steps_of(job) == [2, 3]


def test_on_a_full_disk_a_leader_prunes_before_it_publishes(job):
    daemon, heard, clock = start(job, keep_last=1, trash_grace=30)
    write_pin(job, Pin(1))
    for step in (1, 2, 3):
        write(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 2, 3]
    write(job, 4)
    fill(job)
    clock.at += 5
    daemon.tick(woken=True)
    assert (daemon.trouble.state, read_version(job).step) == ("full", 3)
    assert steps_of(job) == [1, 2, 3, 4], "nothing goes that retention protects"
    remove_pin(job, 1)
    fill(job)
    for _ in range(4):
        clock.at += 20
        daemon.tick()
    assert (daemon.trouble, read_version(job).step) == (None, 4)
    assert [told["step"] for told in heard.of("step_pruned")] == [1, 2]
    daemon.close()


def test_prune_frees_space_on_a_full_disk(job):
    killed_with_a_full_trash(job)
    fill(job)
    done = subprocess.run(
        command("prune", job.root, "--keep-last", 1),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert os.statvfs(job.root).f_bavail * 4096 >= MIB
