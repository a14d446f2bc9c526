"""Whose a state directory is: another job's is refused, and a job directory that was made again is noticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import start, steps_of, write_step
from support.waiting import LONG, until

from syncd.errors import ConfigError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.owner import JobPlace, Owner, check_owner, identity_of, read_owner
from syncd.protocol.version import read_version


def job_at(path: Path, state: Path | None = None, disk: LocalDisk | None = None) -> Job:
    path.mkdir(exist_ok=True)
    return Job.at(path, state, disk)


def led(job: Job) -> Job:
    """Let a daemon lead a job once and release it."""
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    assert daemon.leads
    daemon.close()
    return job


def syncd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncd", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_job_keeps_its_identity_under_every_leader(tmp_path):
    job = led(job_at(tmp_path / "job"))
    identity = identity_of(job)
    assert identity
    assert len(identity) == 32
    assert identity_of(led(job)) == identity
    assert identity_of(led(job_at(tmp_path / "other"))) != identity


class OneNumber(LocalDisk):
    """Gives every directory the same inode number, as ext4 gives that of a directory that has just been removed."""

    def stat(self, path):
        found = super().stat(path)
        return found._replace(inode=7) if found.kind == "directory" else found


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_recreated_job_directory_with_the_same_inode_is_another_job(tmp_path, elsewhere):
    root, state = tmp_path / "job", tmp_path / "state"
    job = job_at(root, state if elsewhere else None, OneNumber())
    daemon, heard, clock = start(job)
    for step in (1, 2, 3):
        write_step(job, step)
    daemon.tick(woken=True)
    assert read_version(job).pair == (1, 3)
    shutil.rmtree(root)
    root.mkdir()
    for step in (7, 8, 9):
        write_step(job, step, salt=99)
    for _ in range(70):
        clock.at += 1
        daemon.tick(woken=True)
    assert heard.names()[-1] == "job_disappeared"
    assert steps_of(job) == [7, 8, 9], "nothing of it is removed"
    version = read_version(job)
    assert version is None or version.pair == (1, 3)
    if not elsewhere:
        assert not os.path.exists(job.version)


def test_a_second_job_on_a_state_directory_exits_with_78(tmp_path):
    state = tmp_path / "state"
    first, second = job_at(tmp_path / "first", state), job_at(tmp_path / "second", state)
    write_step(first, 1)
    write_step(second, 2)
    assert syncd("watch", first.root, "--state-dir", state, "--once").returncode == 0
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    for arguments in (["watch", "--once"], ["watch"], ["status"], ["rollback", "2"], ["pin", "2"], ["wait"]):
        verb, *rest = arguments
        ended = syncd(verb, second.root, *rest, "--state-dir", state)
        assert ended.returncode == 78, arguments
        assert "belongs to another job" in ended.stderr
        assert first.root in ended.stderr
        assert f"rm {state}/job.json" in ended.stderr
    after = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert after == before
    assert syncd("watch", first.root, "--state-dir", state, "--once").returncode == 0
    os.unlink(state / "job.json")
    assert syncd("watch", second.root, "--state-dir", state, "--once").returncode == 0


def test_the_state_directory_of_another_job_is_refused(tmp_path):
    first = led(job_at(tmp_path / "first"))
    with pytest.raises(ConfigError, match="the one that it lies in"):
        check_owner(job_at(tmp_path / "second", Path(first.state)))
    strange = led(job_at(tmp_path / "third", tmp_path / "fourth/.syncd"))
    with pytest.raises(ConfigError, match="belongs to another job"):
        check_owner(job_at(tmp_path / "fourth"))
    check_owner(strange)


def test_a_standby_of_another_job_never_leads(tmp_path):
    state = tmp_path / "state"
    first, second = job_at(tmp_path / "first", state), job_at(tmp_path / "second", state)
    leader, _, clock = start(first)
    other, heard, _ = start(second, clock)
    leader.tick()
    other.tick()
    leader.close()
    other.tick()
    assert not other.leads
    assert other.error.exit_code == 78
    assert heard.names()[-1] == "operation_failed"


def test_a_daemon_that_runs_ends_with_78_if_its_state_directory_becomes_another_job_s(tmp_path):
    state = tmp_path / "state"
    second = led(job_at(tmp_path / "second", tmp_path / "other"))
    job = job_at(tmp_path / "job", state)
    command = [
        sys.executable,
        "-m",
        "syncd",
        "watch",
        job.root,
        "--state-dir",
        str(state),
        "--reconcile",
        "1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: os.path.exists(job.owner))
            os.replace(second.owner, job.owner)
            _, err = process.communicate(timeout=LONG)
        finally:
            process.kill()
    assert process.returncode == 78, err
    assert "belongs to another job" in err


def test_a_moved_job_keeps_its_state_directory(tmp_path):
    state = tmp_path / "state"
    led(job_at(tmp_path / "job", state))
    os.rename(tmp_path / "job", tmp_path / "moved")
    check_owner(job_at(tmp_path / "moved", state))


def test_a_copied_job_is_accepted_only_with_its_identity_file(tmp_path):
    own, state = led(job_at(tmp_path / "job")), tmp_path / "state"
    led(job_at(tmp_path / "job", state))
    assert read_owner(own.disk, f"{state}/job.json").identity == identity_of(own)
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    check_owner(job_at(tmp_path / "copy", state))
    os.unlink(tmp_path / "copy/.syncd/job.json")
    with pytest.raises(ConfigError):
        check_owner(job_at(tmp_path / "copy", state))


@pytest.mark.parametrize("content", [b"", b"{", b'{"protocol":1,"identity":7}', b'{"protocol":1,"place":{}}'])
def test_a_damaged_owner_record_is_rewritten(tmp_path, content):
    job = led(job_at(tmp_path / "job", tmp_path / "state"))
    Path(job.owner).write_bytes(content)
    led(job)
    assert read_owner(job.disk, job.owner).place.path == job.root


def test_an_owner_record_of_a_later_protocol_is_not_overwritten(tmp_path):
    own = led(job_at(tmp_path / "own"))
    Path(own.owner).write_text(json.dumps({"protocol": 2}))
    led(own)
    assert json.loads(Path(own.owner).read_text()) == {"protocol": 2}
    job = led(job_at(tmp_path / "job", tmp_path / "state"))
    Path(job.owner).write_text(json.dumps({"protocol": 2}))
    assert syncd("watch", job.root, "--state-dir", job.state, "--once").returncode == 78


HERE = JobPlace("here", "/job", 5, 100)


@pytest.mark.parametrize(
    ("seen", "is_other"),
    [
        (HERE, False),
        (JobPlace("there", "/mnt/job", 5, 100), False),
        (JobPlace("there", "/mnt/job", 5, 0), False),
        (JobPlace("here", "/moved", 5, 100), False),
        (JobPlace("here", "/job", 5, 0), False),
        (JobPlace("here", "/job", 6, 100), True),
        (JobPlace("here", "/job", 5, 101), True),
        (JobPlace("here", "/second", 5, 0), True),
    ],
)
def test_job_places_are_compared_across_hosts(seen, is_other):
    assert HERE.is_surely_other(seen) is is_other
    assert seen.is_surely_other(HERE) is is_other


def test_an_owner_record_round_trips(tmp_path):
    job = led(job_at(tmp_path / "job", tmp_path / "state"))
    owner = read_owner(job.disk, job.owner)
    found = os.stat(job.root)
    assert owner == Owner(
        None, JobPlace(os.uname().nodename, job.root, found.st_ino, job.disk.born(job.root))
    )


def test_a_job_whose_path_is_no_utf_8_keeps_its_state_directory(tmp_path):
    job = led(job_at(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), tmp_path / "state", Undated()))
    assert read_owner(job.disk, job.owner) is not None
    check_owner(job)


class Undated(LocalDisk):
    """A file system that does not say when a directory was made."""

    def born(self, path):
        return 0
