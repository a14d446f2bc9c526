"""One file or directory that cannot be read or moved costs itself only; the daemon runs as a user who is not root."""

import encodings.ascii  # noqa: F401 - what is imported late, the user may not be able to read
import json
import os
import pwd  # noqa: F401
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.cli import environment
from support.jobs import explorer, start, steps_of, write_step
from support.processes import PROGRAMS
from support.users import DAEMON, OTHER, as_user

from syncd.daemon.foreign import frameworks  # noqa: F401
from syncd.observe import event_names
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, Publisher
from syncd.protocol.request import Pin, Request, request_path, write_pin, write_request
from syncd.protocol.version import read_version, write_marker

MINUTE = 61.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def job():
    """Return a job of the daemon's user, below a directory that everybody can reach."""
    above = Path(tempfile.mkdtemp(prefix="syncd-entry-"))
    above.chmod(0o755)
    (above / "job").mkdir()
    os.chown(above / "job", DAEMON, DAEMON)
    yield Job.at(above / "job")
    shutil.rmtree(above)


@pytest.fixture
def led(job):
    """Return a daemon that keeps one sync step, what it tells, its clock, and what lets time pass."""
    daemon, heard, clock = start(job, keep_last=1, reconcile=60.0)

    def passes(seconds=5.0):
        clock.at += seconds
        with as_user(DAEMON):
            daemon.tick(woken=True)
        assert daemon.error is None, daemon.error

    with as_user(DAEMON):
        daemon.tick()
    return daemon, heard, clock, passes


def run_as_user(uid, *words):
    """Run a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, f"{PROGRAMS}/as_user.py", str(uid), "-", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(HOME="/nonexistent"),
    )


def write(job, *steps, **more):
    with as_user(DAEMON):
        for step in steps:
            write_step(job, step, **more)


def published(job):
    return read_version(job).step


def closed(path, mode=0o600):
    """Make something another user's alone."""
    os.chown(path, OTHER, OTHER)
    os.chmod(path, mode)


def opened(path):
    """Do what the hint says for what cannot be read."""
    os.chmod(path, 0o755)


def is_told(told, path, mode, command):
    """Say whether a text tells path, owner, mode and what to run."""
    return all(part in told for part in (str(path), f"uid {OTHER}", f"mode {mode:04o}", f"sudo {command}"))


def test_an_unreadable_presence_stops_removals_while_its_explorer_lives(job, led):
    _, heard, clock, passes = led
    presence = f"{job.explorers}/e0.json"
    module = explorer(job, clock, "e0")
    write(job, 1, 2, 3)
    closed(presence)
    passes()
    assert published(job) == 3
    for step in (4, 5):
        write(job, step)
        module.update()
        closed(presence)
        passes(MINUTE - 20)
        assert published(job) == step
    assert steps_of(job) == [1, 2, 3, 4, 5]
    told = heard.of(event_names.ENTRY_READ_FAILED)
    assert len(told) == 1
    assert is_told(told[0]["detail"], presence, 0o600, "chmod -R a+rX")
    passes(MINUTE)
    assert steps_of(job) == [4, 5]


def test_an_unreadable_presence_directory_stops_removals(job, led):
    _, heard, _, passes = led
    closed(job.explorers, 0o700)
    write(job, 1, 2, 3)
    for _ in range(3):
        passes(MINUTE)
    assert published(job) == 3
    assert steps_of(job) == [1, 2, 3]
    assert is_told(
        heard.of(event_names.ENTRY_READ_FAILED)[0]["detail"], job.explorers, 0o700, "chmod -R a+rX"
    )
    opened(job.explorers)
    passes(MINUTE)
    assert steps_of(job) == [3]


def test_an_unreadable_step_is_kept_and_does_not_delay_others(job, led):
    _, heard, _, passes = led
    write(job, 1, 2)
    passes()
    write(job, 3, announce=False)
    closed(job.step(3), 0o700)
    write(job, 4, 5)
    for _ in range(70):
        passes(MINUTE)
    assert published(job) == 5
    assert steps_of(job) == [2, 3, 5]
    (told,) = heard.of(event_names.STEP_DAMAGED)
    assert is_told(told["problem"], job.step(3), 0o700, "chmod -R a+rX")
    os.chown(job.step(3), DAEMON, DAEMON)
    passes(MINUTE)
    passes()
    assert steps_of(job) == [2, 5]


def test_a_step_with_an_unreadable_shard_is_published_once_readable(job, led):
    _, heard, _, passes = led
    write(job, 1, 2)
    shard = f"{job.step(2)}/actor/model-00001-of-00001.safetensors"
    closed(shard)
    passes()
    passes()
    assert published(job) == 1
    told = heard.of(event_names.STEP_DAMAGED)[0]
    assert is_told(told["problem"], shard, 0o600, "chmod -R a+rX")
    opened(shard)
    passes()
    assert published(job) == 2


def test_an_immovable_step_is_reported_and_does_not_stop_other_removals(job, led):
    _, heard, _, passes = led
    write(job, 1, 2, 3)
    closed(job.step(1), 0o755)
    passes()
    passes()
    assert steps_of(job) == [1, 3]
    (told,) = heard.of(event_names.ENTRY_MOVE_FAILED)
    assert told["path"] == job.step(1)
    assert f"uid {OTHER}" in told["owner"]
    assert told["hint"] == f"sudo chown -R {DAEMON} {job.step(1)}"
    os.chown(job.step(1), DAEMON, DAEMON)
    passes(MINUTE)
    assert steps_of(job) == [3]


def test_an_unreadable_pin_pins_and_an_unreadable_pin_directory_keeps_all(job, led):
    _, _, _, passes = led
    write(job, 1, 2, 3)
    write_pin(job, Pin(1))
    closed(f"{job.pins}/global_step_1.json")
    passes()
    assert steps_of(job) == [1, 3]
    closed(job.pins, 0o700)
    passes()
    write(job, 4, 5)
    passes()
    assert published(job) == 5
    assert steps_of(job) == [1, 3, 4, 5]


def test_an_unreadable_request_is_reported_and_ignored(job, led):
    _, heard, _, passes = led
    write(job, 1, 2)
    passes()
    closed_request = Request("rollback", 1, "a" * 32)
    write_request(job, closed_request)
    closed(request_path(job, closed_request.identity))
    write(job, 3)
    passes()
    assert published(job) == 3
    told = heard.of(event_names.ENTRY_READ_FAILED)[0]["detail"]
    assert is_told(told, request_path(job, closed_request.identity), 0o600, "chmod -R a+rX")


def test_a_request_that_cannot_be_removed_is_carried_out_once(job):
    os.makedirs(job.requests)
    os.chown(job.state, DAEMON, DAEMON)
    os.chmod(job.requests, 0o1777)  # as in /tmp, only its owner removes a file
    write(job, 1, 2, 3)
    for step, restarts in ((2, False), (1, True)):
        daemon, heard, clock = start(job, keep_last=9)
        with as_user(DAEMON):
            daemon.tick()
        with as_user(OTHER):
            write_request(job, Request("rollback", step, asked_at=float(step)))
        for _ in range(3):
            clock.at += MINUTE
            with as_user(DAEMON):
                daemon.tick()
            assert daemon.error is None
            assert published(job) == step
        assert len(heard.of(event_names.ENTRY_MOVE_FAILED)) == 1 + restarts
    assert read_version(job).generation == 3


def test_an_unreadable_marker_does_not_stop_publishing(job, led):
    _, heard, _, passes = led
    write(job, 1)
    passes()
    write(job, 2)
    closed(job.marker)
    for _ in range(3):
        passes()
    assert published(job) == 2
    assert any(
        is_told(told["detail"], job.marker, 0o600, "chmod -R a+rX")
        for told in heard.of(event_names.MARKER_REJECTED)
    )


def test_an_unreadable_tracker_keeps_every_full_checkpoint(job):
    daemon, heard, _ = start(job, keep_last=1, keep_full=1)
    write(job, 1, 2, full=True)
    write(job, 3)
    write_marker(job.disk, job.tracker, 1)
    closed(job.tracker)
    with as_user(DAEMON):
        daemon.tick()
    assert daemon.error is None
    assert published(job) == 3
    assert steps_of(job) == [1, 2, 3]
    assert is_told(heard.of(event_names.ENTRY_READ_FAILED)[0]["detail"], job.tracker, 0o600, "chmod -R a+rX")


def test_an_old_presence_that_cannot_be_removed_is_reported_once(job, led):
    _, heard, clock, passes = led
    os.chmod(job.explorers, 0o1777)
    explorer(job, clock, "old")
    os.chown(f"{job.explorers}/old.json", OTHER, OTHER)
    os.chown(job.explorers, 0, 0)  # in a sticky directory of another, only a file's owner removes it
    passes(MINUTE)
    passes(86400.0)
    write(job, 1)
    passes(MINUTE)
    assert published(job) == 1
    assert len(heard.of(event_names.ENTRY_MOVE_FAILED)) == 1


def led_before(job, *steps):
    """Have another user's daemon lead and remove steps, and leave what nobody else can change."""
    before, _, _ = start(job, keep_last=1)
    for step in steps:
        write(job, step)
        with as_user(DAEMON):
            before.tick(woken=True)
    for path in (f"{job.lock}/0000000001", f"{job.trash}/0000000001"):
        os.chown(path, OTHER, OTHER)
        os.chmod(path, 0o755)
    return before


def test_unremovable_directories_of_an_ended_daemon_do_not_stop_a_new_leader(job):
    before = led_before(job, 1, 2, 3)
    before.close()
    daemon, heard, _ = start(job, keep_last=1)
    write(job, 4)
    with as_user(DAEMON):
        daemon.tick()
    assert daemon.error is None
    assert published(job) == 4
    told = {event["path"]: event for event in heard.of(event_names.ENTRY_MOVE_FAILED)}
    assert told.keys() == {f"{job.lock}/0000000001", f"{job.trash}/0000000001"}
    assert all(f"uid {OTHER}" in event["owner"] for event in told.values())


def test_unremovable_directories_of_a_possible_leader_stop_a_takeover(job):
    led_before(job, 1, 2, 3)
    daemon, heard, clock = start(job, takeover=15.0)
    for _ in range(3):
        with as_user(DAEMON):
            daemon.tick()
        clock.at += 20.0
    assert not daemon.leads
    told = heard.of("operation_failed")[-1]
    assert f"uid {OTHER}" in told["detail"]
    assert told["hint"].startswith(f"sudo chown -R {DAEMON} ")


def test_status_and_ls_show_unreadable_entries_and_all_others(job):
    write(job, 1, 2, 3, 4)
    with as_user(DAEMON):
        start(job, prune=False)[0].tick()
    closed(job.step(3), 0o700)
    closed(job.step(2), 0o755)
    closed(f"{job.lock}/0000000001", 0o700)
    status = run_as_user(DAEMON, "status", job.root)
    assert status.returncode == 0, status.stderr
    told = " ".join(status.stdout.split())
    for path in (job.step(3), f"{job.lock}/0000000001"):
        assert f"{path}: Permission denied for uid {DAEMON} (directory of uid {OTHER}, mode 0700)" in told
    listed = run_as_user(DAEMON, "ls", job.root, "--json")
    assert listed.returncode == 0, listed.stderr
    rules = {row["step"]: row["rule"] for row in json.loads(listed.stdout)["steps"]}
    assert rules[3] == "unreadable_step"
    with as_user(DAEMON):
        explorer(job, SystemClock(), "e0")
    closed(f"{job.explorers}/e0.json")
    listed = run_as_user(DAEMON, "ls", job.root, "--json")
    assert {row["rule"] for row in json.loads(listed.stdout)["steps"]} == {
        "newest_version",
        "unreadable_presence",
    }


def test_prune_removes_the_rest_and_fails_with_what_it_could_not_remove(job):
    write(job, 1, 2, 3)
    closed(job.step(1), 0o755)
    done = run_as_user(DAEMON, "prune", job.root, "--keep-last", "1")
    assert done.returncode == 74
    assert f"sudo chown -R {DAEMON} {job.step(1)}" in done.stderr
    assert steps_of(job) == [1, 3]


def test_a_dead_trainer_and_explorer_with_one_name_keep_no_step(job, led):
    _, _, clock, passes = led
    trainer = Publisher(job.disk, clock, job.trainers, Presence("node-0", incarnation="trainer"))
    trainer.prepare()
    trainer.update(leases=(1,))
    explorer(job, clock, "node-0", leases=(1,))
    write(job, 1, 2, 3)
    passes()
    passes()
    assert steps_of(job) == [1, 3]
    passes(MINUTE)
    passes()
    assert steps_of(job) == [3]


def test_an_unreadable_attempt_is_reported_and_kept(job, led):
    _, heard, _, passes = led
    attempt = f"{job.root}/.global_step_9.{'a' * 32}"
    os.makedirs(f"{attempt}/actor/.receipts")
    closed(attempt, 0o700)
    write(job, 1, 2, 3)
    for _ in range(2):
        passes(MINUTE)
    assert published(job) == 3
    assert steps_of(job) == [3]
    assert os.path.isdir(attempt)
    told = next(event for event in heard.of(event_names.STEP_FOUND) if event["step"] == 9)
    assert is_told(told["problem"], attempt, 0o700, "chmod -R a+rX")
