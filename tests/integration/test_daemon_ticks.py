"""The daemon in one process on a real file system, its clock moved by hand."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.jobs import ManualClock, explorer, start, steps_of, write_step

from syncd.daemon import removals, scan
from syncd.daemon.run import run_once
from syncd.errors import JobMissingError, LockHeldError
from syncd.protocol.disk import temporary_name
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import Presence, Publisher, RunningStatus
from syncd.protocol.process import Process
from syncd.protocol.read_bytes import INFO as READ
from syncd.protocol.read_bytes import ReadBytes
from syncd.protocol.request import Pin, Request, read_requests, write_pin, write_request
from syncd.protocol.version import read_version, write_marker
from syncd.protocol.writer import StepWriter
from syncd.synchronizer import Synchronizer
from syncd.views.job_view import JobViewer
from syncd.views.problems import problems


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def pair(job):
    version = read_version(job)
    return version.pair if version else None


def other_host() -> Process:
    """A process of which nobody here can say whether it lives."""
    return Process("another-boot", "pid:[1]", 4242, 1)


def test_each_step_is_published_and_old_ones_are_pruned(job):
    daemon, heard, _ = start(job)
    for step in range(1, 6):
        write_step(job, step, world_size=2)
        daemon.tick(woken=True)
        assert pair(job) == (1, step)
    assert steps_of(job) == [4, 5]
    assert [event["rule"] for event in heard.of("step_pruned")] == ["superseded"] * 3


def test_progress_is_reported_during_a_long_verification(job):
    """The service manager's watchdog must not end a daemon in the midst of reading a large step."""
    daemon, _, _ = start(job, verify="content")
    daemon.tick()
    seen = []
    daemon.on_progress(lambda: seen.append(pair(job)))
    write_step(job, 1, world_size=5)
    daemon.tick(woken=True)
    assert pair(job) == (1, 1)
    assert seen.count(None) >= 5, "once a file at least, before anything is published"


@pytest.mark.parametrize("native", [True, False])
def test_the_term_beats_while_a_large_header_is_parsed(job, native):
    """A legal header of 10^6 tensors parses for seconds, on a busy host for longer than a stand-by waits."""
    count = 40_000
    entries = {f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(count)}
    text = json.dumps(entries).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(count)
    daemon, _, clock = start(job)
    daemon.tick()
    if native:
        writer = StepWriter(job, 1, 1, "attempt")
        writer.begin()
        shard = writer.write("actor/model-00001-of-00001.safetensors", content, tensors=count)
        writer.receipt(1, [shard])
        writer.seal()
        writer.announce()
    else:
        os.makedirs(f"{job.root}/checkpoint-1")
        Path(job.root, "checkpoint-1", "config.json").write_text("{}")
        Path(job.root, "checkpoint-1", "model.safetensors").write_bytes(content)
    places = []

    def progress():
        frame, inside = sys._getframe(), False
        while frame is not None:
            inside = inside or frame.f_code.co_name == "parse_header"
            frame = frame.f_back
        places.append(inside)

    daemon.on_progress(progress)
    clock.at += 1
    daemon.tick(woken=True)
    assert places.count(True) >= 2, "from within the header"


@pytest.mark.fault("versions faster than the poll leak")
def test_steps_that_were_never_published_are_pruned_too(job):
    daemon, _, _ = start(job)
    daemon.tick()
    for step in range(1, 9):
        write_step(job, step)
    daemon.tick(woken=True)
    assert pair(job) == (1, 8)
    assert steps_of(job) == [7, 8]


def test_progress_events_are_emitted_while_a_step_fills(job):
    daemon, heard, _ = start(job)
    writer = StepWriter(job, 7, 3, "a")
    writer.begin()
    for rank in (1, 2, 3):
        writer.receipt(rank, [writer.write(f"actor/model-0000{rank}-of-00003.safetensors", b"x" * 9)])
        daemon.tick(woken=True)
    seen = [(event["present"], event["expected"]) for event in heard.of("step_progressed")]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert pair(job) is None


@pytest.mark.fault("an empty or torn marker starves the loop")
def test_a_bad_marker_is_reported_once_and_publishing_continues(job):
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    for _ in range(5):
        with open(job.marker, "wb") as file:
            file.write(b"")
        daemon.tick(woken=True)
        clock.at += 0.7
    assert len(heard.of("marker_rejected")) == 1
    write_step(job, 2)
    daemon.tick(woken=True)
    assert pair(job) == (1, 2)


@pytest.mark.fault("a marker moving back is ignored")
def test_a_rewind_is_published_and_abandoned_steps_are_removed(job):
    daemon, heard, clock = start(job, keep_last=9)
    for step in range(1, 6):
        write_step(job, step)
    daemon.tick(woken=True)
    write_marker(job.disk, job.marker, 2)
    daemon.tick(woken=True)
    assert pair(job) == (1, 5), "a marker that goes back must stand still first"
    clock.at += 1.5
    daemon.tick()
    assert pair(job) == (2, 2)
    assert heard.of("version_rewound") == [{"reason": "rewind", "step": 2, "before": 5}]
    assert steps_of(job) == [1, 2, 3, 4, 5], "3 might be the new run's, sealed and not yet announced"
    clock.at += 3600
    daemon.tick()
    assert steps_of(job) == [1, 2, 5], "5 is the previous version"
    write_step(job, 3)
    daemon.tick(woken=True)
    assert pair(job) == (2, 3)


def test_what_was_looked_at_before_a_pause_has_not_been_unchanged_for_its_length(job, monkeypatch):
    """The daemon is paused for minutes in the midst of a scan, after it has read marker and attempts."""
    daemon, _, clock = start(job, keep_last=9)
    for step in (1, 12):
        write_step(job, step)
    daemon.tick(woken=True)
    for attempt in ("first", "second"):
        StepWriter(job, 13, 1, attempt).begin()

    def pause(*arguments):
        clock.at += 300
        return original(*arguments)

    original = scan.read_requests_and_problems
    monkeypatch.setattr(scan, "read_requests_and_problems", pause)
    write_marker(job.disk, job.marker, 1)  # the beginning of 12, as it is written in place
    daemon.tick(woken=True)
    monkeypatch.undo()
    write_marker(job.disk, job.marker, 12)
    daemon.tick(woken=True)
    assert pair(job) == (1, 12), "the marker that went back was read once"
    assert len(daemon.snapshot.rivals) == 1, "both attempts were seen once"
    clock.at += 61
    daemon.tick()
    daemon.tick()
    assert not daemon.snapshot.rivals


def test_a_file_that_came_and_went_between_two_looks_is_a_change_of_its_attempt(job):
    """A writer's call fails after a while: it removes its temporary file, and the attempt has the size it had."""
    daemon, _, clock = start(job)
    for attempt in ("first", "second"):
        StepWriter(job, 13, 1, attempt).begin()
    daemon.tick(woken=True)
    clock.at += 50
    for attempt in ("first", "second"):
        temporary = Path(job.attempt(13, attempt)) / "actor" / ".receipts" / ".00001-of-00001.json.0.tmp"
        temporary.write_bytes(b"{}")
        temporary.unlink()
    daemon.tick()
    clock.at += 50
    daemon.tick()
    daemon.tick()
    assert len(daemon.snapshot.rivals) == 1, "50 s after a change"
    clock.at += 11
    daemon.tick()
    daemon.tick()
    assert not daemon.snapshot.rivals


@pytest.mark.fault("a step is pruned while it is read")
def test_a_leased_step_is_kept_until_its_reader_dies(job):
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    reader = explorer(job, clock, leases=(1,))
    for step in (2, 3, 4):
        write_step(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 3, 4]
    for _ in range(10):
        clock.at += 10
        reader.beat()
        daemon.tick()
    assert 1 in steps_of(job)
    for _ in range(10):
        clock.at += 10
        daemon.tick()
    assert steps_of(job) == [3, 4]
    assert [event["explorer"] for event in heard.of("explorer_died")] == ["e0"]


def test_a_lease_written_after_the_decision_keeps_its_step(job):
    """The leases are read again right before the rename, whatever the snapshot said."""
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    write_step(job, 2)
    daemon.tick(woken=True)
    explorer(job, clock)
    clock.at += 6
    daemon.tick()
    write_step(job, 3)
    explorer(job, clock, leases=(1,))
    daemon.tick(woken=True)
    assert steps_of(job) == [1, 2, 3]
    assert any("leased by e0" in event["detail"] for event in heard.of("step_kept"))


def test_an_explorer_considered_dead_that_beats_again_keeps_its_lease(job):
    daemon, _, clock = start(job, keep_last=1)
    write_step(job, 1)
    daemon.tick(woken=True)
    reader = explorer(job, clock, leases=(1,))
    write_step(job, 2)
    clock.at += 6
    daemon.tick(woken=True)
    clock.at += 61
    daemon.tick()
    reader.update()  # it wakes up; the daemon has not looked yet
    write_step(job, 3)
    write_step(job, 4)
    daemon.tick(woken=True)
    assert steps_of(job) == [1, 2, 4]


def test_a_step_is_kept_while_the_trainer_adds_a_full_checkpoint(job):
    """The optimizer's files take minutes; the step must not be superseded under them."""
    daemon, _, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    trainer = Publisher(job.disk, clock, job.trainers, Presence("t", incarnation="i"))
    trainer.prepare()
    trainer.update(leases=(1,))
    for step in (2, 3, 4):
        write_step(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 3, 4]
    job.disk.replace(f"{job.step(1)}/.full_checkpoint", b"{}")
    trainer.update(leases=())
    clock.at += 61
    write_step(job, 5)
    daemon.tick(woken=True)
    assert steps_of(job) == [1, 4, 5]


def test_a_new_full_checkpoint_replaces_an_older_one_under_keep_full(job):
    daemon, _, clock = start(job, keep_last=1, keep_full=1, trash_grace=0)
    write_step(job, 1, full=True)
    job.disk.replace(job.tracker, b"1")
    daemon.tick(woken=True)
    for step in (2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 2, 3]
    job.disk.replace(f"{job.step(3)}/.full_checkpoint", b"{}")
    job.disk.replace(job.tracker, b"3")
    clock.at += 6
    for _ in range(2):
        daemon.tick()
    assert steps_of(job) == [2, 3]


def test_a_full_checkpoint_behind_the_tracker_is_counted(job):
    daemon, _, clock = start(job, keep_last=1, keep_full=2, trash_grace=0)
    write_step(job, 1, full=True)
    job.disk.replace(job.tracker, b"1")
    for step in (1, 3, 4):
        if step > 1:
            write_step(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 3, 4], "3 is the version before"
    clock.at += 6
    daemon.tick()
    for step in (3, 4):
        job.disk.replace(f"{job.step(step)}/.full_checkpoint", b"{}")
        job.disk.replace(job.tracker, str(step).encode())
    clock.at += 6
    for _ in range(2):
        daemon.tick()
    assert steps_of(job) == [3, 4]


def test_a_damaged_or_newer_presence_stops_pruning_until_it_is_silent(job):
    daemon, _, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    for name, text in (("torn", "{"), ("newer", '{"protocol": 99, "leases": [1]}')):
        with open(f"{job.explorers}/{name}.json", "w") as file:
            file.write(text)
    for step in (2, 3, 4):
        write_step(job, step)
        daemon.tick(woken=True)
    assert pair(job) == (1, 4), "publishing goes on"
    assert steps_of(job) == [1, 2, 3, 4]
    for _ in range(15):
        clock.at += 6
        daemon.tick()
    assert steps_of(job) == [3, 4]


def test_pinned_steps_full_checkpoints_and_other_entries_are_kept(job, tmp_path):
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "global_step_99").symlink_to(tmp_path / "notes")
    daemon, _, _ = start(job)
    write_step(job, 1, full=True)
    write_step(job, 2)
    write_pin(job, Pin(2, "the good one"))
    for step in range(3, 7):
        write_step(job, step)
    daemon.tick(woken=True)
    names = {entry.name for entry in job.disk.list(job.root)}
    assert {"global_step_x", "notes", "global_step_99"} <= names
    assert [s for s in range(1, 7) if f"global_step_{s}" in names] == [1, 2, 5, 6]


@pytest.mark.fault("a payload that is late behind its marker kills the watcher silently")
def test_a_step_is_published_once_complete_if_the_marker_was_ahead(job):
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    write_marker(job.disk, job.marker, 2)
    for _ in range(3):
        daemon.tick(woken=True)
        clock.at += 0.7
    assert len(heard.of("marker_rejected")) == 1
    write_step(job, 2, announce=False)
    daemon.tick(woken=True)
    assert pair(job) == (1, 2)


def test_damaged_content_is_never_announced(job):
    daemon, heard, _ = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    manifest = write_step(job, 2, announce=False)
    path = f"{job.step(2)}/{manifest.shards[0].name}"
    with open(path, "r+b") as file:
        file.write(b"\xff" * 8)  # same size, no header any more
    write_marker(job.disk, job.marker, 2)
    daemon.tick(woken=True)
    daemon.tick(woken=True)
    assert pair(job) == (1, 1)
    assert heard.of("step_damaged")


def test_truncation_of_the_published_step_is_reported(job):
    daemon, heard, clock = start(job)
    manifest = write_step(job, 1)
    daemon.tick(woken=True)
    os.truncate(f"{job.step(1)}/{manifest.shards[0].name}", 10)
    clock.at += 61
    daemon.tick()
    assert any("no longer complete" in event.get("detail", "") for event in heard.of("step_damaged"))
    assert pair(job) == (1, 1)
    write_step(job, 2)
    daemon.tick(woken=True)
    assert pair(job) == (1, 2)


def test_a_host_that_read_more_than_its_share_is_a_problem_and_damages_no_step(job):
    daemon, heard, clock = start(job)
    write_step(job, 1)
    explorer(job, clock, info={READ: ReadBytes(10, 0, over_budget=True).document()})
    daemon.tick(woken=True)
    assert not heard.of("step_damaged")
    assert "origin_budget" in dict(problems(JobViewer(job, clock).read()))


@pytest.mark.fault("a restart below an explorer's version asserts")
def test_a_lost_version_file_is_rewritten_with_a_higher_pair(job):
    daemon, _, _ = start(job)
    write_step(job, 5)
    daemon.tick(woken=True)
    os.unlink(job.version)
    daemon.tick(woken=True)
    assert pair(job) == (2, 5)
    with open(job.version, "wb") as file:
        file.write(b"{torn")
    daemon.tick(woken=True)
    assert pair(job) == (3, 5)


def test_the_pair_increases_across_restarts_without_the_version_file(job):
    first, _, _ = start(job)
    write_step(job, 5)
    first.tick(woken=True)
    first.close()
    os.unlink(job.version)
    second, _, _ = start(job)
    second.tick(woken=True)
    assert pair(job) == (2, 5)


def test_a_daemon_that_starts_during_a_rollback_carries_it_out(job, shell, monkeypatch):
    daemon, _, _ = start(job)
    for step in (1, 2):
        write_step(job, step)
        daemon.tick(woken=True)

    def once(*_):
        daemon.tick(woken=True)
        raise LockHeldError("a daemon leads this job")

    monkeypatch.setattr("syncd.cli.watch.once", once)
    assert shell("rollback", job.root, "1", "--timeout", "30").code == 0
    assert read_version(job).pair == (2, 1)


def test_a_rollback_request_is_carried_out_once(job):
    daemon, heard, _ = start(job, keep_last=5)
    for step in (1, 2, 3):
        write_step(job, step)
    daemon.tick(woken=True)
    write_request(job, Request("rollback", 2))
    for _ in range(3):
        daemon.tick(woken=True)
    assert pair(job) == (2, 2)
    assert read_requests(job) == ()
    assert len(heard.of("request_completed")) == 1
    write_step(job, 4)
    daemon.tick(woken=True)
    assert pair(job) == (2, 4)


def test_a_step_is_vacated_after_a_rewind(job):
    daemon, _, clock = start(job, keep_last=5)
    for step in (1, 2, 3):
        write_step(job, step)
    daemon.tick(woken=True)
    write_marker(job.disk, job.marker, 1)
    write_request(job, Request("vacate", 3))
    daemon.tick(woken=True)
    clock.at += 2
    daemon.tick()
    daemon.tick()
    assert pair(job) == (2, 1)
    assert steps_of(job) == [1, 2]
    assert read_requests(job) == ()
    write_step(job, 3, salt=77)
    daemon.tick(woken=True)
    assert pair(job) == (2, 3)


def test_a_standby_takes_over_when_the_leader_is_silent(job):
    clock = ManualClock()
    first, _, _ = start(job, clock)
    first.leader._candidate._process = other_host()
    write_step(job, 1)
    first.tick(woken=True)
    second, heard, _ = start(job, clock)
    second.tick()
    assert not second.leads
    for _ in range(20):
        clock.at += 2
        first.tick()
        second.tick()
    assert not second.leads
    for _ in range(20):
        clock.at += 2
        second.tick()
    assert second.leads
    assert "leadership_acquired" in heard.names()


def test_a_leader_that_wakes_after_a_takeover_cannot_publish_or_delete(job):
    clock = ManualClock()
    old, heard, _ = start(job, clock, keep_last=1)
    old.leader._candidate._process = other_host()
    write_step(job, 1)
    old.tick(woken=True)
    term = old.leader.term
    new, _, _ = start(job, clock)
    for _ in range(20):
        clock.at += 2
        new.tick()
    for step in (2, 3, 4):
        write_step(job, step)
    before = pair(job), steps_of(job)
    assert old.leader.term is term
    old.tick(woken=True)
    assert heard.names()[-1] == "leadership_lost"
    assert not old.leads
    assert (pair(job), steps_of(job)) == before
    new.tick(woken=True)
    assert pair(job) == (1, 4)


def test_a_missing_job_is_reported_and_publishing_resumes_afterwards(tmp_path):
    root, away = tmp_path / "job", tmp_path / "away"
    root.mkdir()
    job = Job.at(root)
    daemon, heard, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    os.rename(root, away)
    for _ in range(3):
        daemon.tick(woken=True)
    assert heard.names().count("job_disappeared") == 1
    root.mkdir()  # the mount point of a mount that is gone
    daemon.tick(woken=True)
    assert list(root.iterdir()) == [], "nothing may be written below an unmounted job"
    root.rmdir()
    os.rename(away, root)
    daemon.tick(woken=True)
    assert heard.names()[-1] == "job_recovered"
    write_step(job, 2)
    clock.at += 3
    daemon.tick(woken=True)
    assert pair(job) == (1, 2)


def test_the_trash_is_emptied_after_its_grace_period(job):
    daemon, _, clock = start(job, trash_grace=30.0)
    for step in (1, 2, 3):
        write_step(job, step)
    daemon.tick(woken=True)

    def trash():
        return [path.name for path in Path(job.trash).glob("*/*/*")]

    assert len(trash()) == 1
    clock.at += 20
    daemon.tick()
    assert len(trash()) == 1
    clock.at += 31
    daemon.tick()
    assert trash() == []


class Killed(BaseException):
    """The end of a process, as far as one in the same process can play it."""


class KilledInTrash(LocalDisk):
    """A disk under a process that is killed in place of one of its deletions in the trash."""

    deletions = 1000

    def unlink(self, path):
        if "/trash/" in path:
            self.deletions -= 1
            if not self.deletions:
                raise Killed
        super().unlink(path)


@pytest.mark.parametrize("deletion", [1, 2, 3])
def test_a_step_that_a_killed_daemon_has_deleted_in_part_does_not_come_back(tmp_path, deletion):
    """The next leader gives a dead reader a whole `ttl` again, and with it its lease."""
    job = Job.at(tmp_path, disk=KilledInTrash())
    daemon, _, clock = start(job)
    write_step(job, 1, world_size=2)
    daemon.tick(woken=True)
    explorer(job, clock, leases=(1,))
    for step in (2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    job.disk.deletions = deletion
    for _ in range(300):
        clock.at += 1
        with contextlib.suppress(Killed):
            daemon.tick()
        if job.disk.deletions <= 0:
            break
    assert job.disk.deletions <= 0
    daemon.leader.release()
    after, _, _ = start(job, clock)
    for _ in range(30):
        after.tick(woken=True)
        assert steps_of(job) == [2, 3]
        clock.at += 6
    assert list(Path(job.trash).glob("*/*/*")) == []


def test_temporary_files_of_killed_writers_are_removed_after_a_while(job):
    daemon, _, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    ours = [
        f"{job.root}/{temporary_name('latest_state_dict_iteration.txt')}",
        f"{job.pins}/{temporary_name('p.json')}",
    ]
    theirs = [f"{job.root}/.notes.tmp", f"{job.root}/.model.safetensors.0.tmp"]
    for path in (*ours, *theirs):
        with open(path, "w"):
            pass
    for _ in range(59):
        clock.at += 61
        daemon.tick()
    assert [os.path.exists(path) for path in ours] == [True, True], "it may be about to be renamed"
    for _ in range(3):
        clock.at += 61
        daemon.tick()
    assert [os.path.exists(path) for path in ours] == [False, False]
    assert all(os.path.exists(path) for path in theirs)


def test_run_once_does_one_cycle_and_releases_the_lead(job):
    for step in (1, 2, 3):
        write_step(job, step)
    daemon, _, clock = start(job)
    run_once(daemon, clock)
    assert pair(job) == (1, 3)
    other, _, _ = start(job)
    other.tick()
    assert other.leads
    third, _, _ = start(job)
    with pytest.raises(LockHeldError):
        run_once(third, clock)


def test_run_once_publishes_a_rewind(job):
    daemon, _, clock = start(job, keep_last=5)
    for step in (1, 2, 3):
        write_step(job, step)
    run_once(daemon, clock)
    write_marker(job.disk, job.marker, 1)
    again, _, _ = start(job, clock, keep_last=5)
    run_once(again, clock)
    assert pair(job) == (2, 1)


def test_run_once_in_a_missing_job_fails(tmp_path):
    daemon, _, clock = start(Job.at(tmp_path / "nowhere"))
    with pytest.raises(JobMissingError):
        run_once(daemon, clock)
    assert not (tmp_path / "nowhere").exists()


def test_an_external_state_directory_leaves_the_job_untouched(tmp_path):
    root, state = tmp_path / "job", tmp_path / "state"
    root.mkdir()
    job = Job.at(root, state)
    for step in (1, 2, 3, 4):
        write_step(job, step)
    before = sorted(str(path) for path in root.rglob("*"))
    daemon, heard, _ = start(job, prune=False)
    daemon.tick(woken=True)
    assert pair(job) == (1, 4)
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert "operation_failed" not in heard.names()


def test_the_daemon_knows_when_all_modules_have_left(job):
    daemon, _, clock = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    assert not daemon.is_left, "nobody has been there yet"
    reader = explorer(job, clock)
    clock.at += 6
    daemon.tick()
    assert not daemon.is_left
    reader.update(status=RunningStatus.STOPPED)
    clock.at += 6
    daemon.tick()
    assert daemon.is_left


def test_a_full_disk_is_reported_once_and_publishing_resumes(job, monkeypatch):
    daemon, heard, _ = start(job)
    daemon.tick()
    write_step(job, 1)
    real = type(job.disk).replace

    def full(disk, path, data, **more):
        if path == job.version:
            raise OSError(28, "No space left on device", path)
        real(disk, path, data, **more)

    monkeypatch.setattr(type(job.disk), "replace", full)
    for _ in range(3):
        daemon.tick(woken=True)
    assert heard.names().count("operation_failed") == 1
    assert pair(job) is None
    monkeypatch.undo()
    daemon.tick(woken=True)
    assert pair(job) == (1, 1)


def test_another_directory_in_place_of_the_job_is_reported_as_missing(tmp_path):
    """Another directory in the place of the job is never taken for an empty job."""
    root = tmp_path / "job"
    root.mkdir()
    job = Job.at(root, tmp_path / "state")
    daemon, heard, _ = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    shutil.move(root, tmp_path / "old")
    root.mkdir()
    daemon.tick(woken=True)
    assert heard.names()[-1] == "job_disappeared"
    assert pair(job) == (1, 1)


def test_a_step_found_damaged_by_one_reading_only_is_published(job, monkeypatch):
    """What a read returns may have a flipped bit where the file has none."""
    from syncd.daemon import service

    readings = iter([["model.safetensors: not what its header says"]])
    monkeypatch.setattr(service, "problems_of", lambda *_: next(readings, []))
    write_step(job, 1)
    daemon, heard, _ = start(job)
    daemon.tick()
    assert [event["step"] for event in heard.of("version_published")] == [1]
    assert heard.of("step_damaged") == []


def test_an_explorer_that_stopped_before_the_daemon_started_is_not_reported_as_joined(job):
    clock = ManualClock()
    explorer(job, clock, "gone").update(status=RunningStatus.STOPPED)
    explorer(job, clock, "here")
    daemon, heard, _ = start(job, clock)
    daemon.tick()
    assert [fields["explorer"] for fields in heard.of("explorer_joined")] == ["here"]
    assert heard.of("explorer_left") == []


def test_what_explorers_run_is_reported_for_all_of_them_in_one_event(job):
    clock = ManualClock()

    def engine(state):
        return EngineReport(state).document()

    first = explorer(job, clock, "a", applied=(1, 3), info=engine(EngineState.PROVEN))
    second = explorer(job, clock, "b")
    explorer(job, clock, "gone").update(status=RunningStatus.STOPPED)
    daemon, heard, _ = start(job, clock)

    def told(**changes):
        heard.events.clear()
        clock.at += 6
        for each in (first, second):
            each.update(**(changes.get(each.presence.identity) or {}))
        daemon.tick()
        return [fields["explorers"] for fields in heard.of("versions_applied")]

    assert told() == [[["a", 1, 3, "proven"], ["b", None, None, None]]]
    assert told() == [], "a heartbeat is no change"
    assert told(a={"loading": (1, 4), "info": engine(EngineState.LOADING)}) == []
    loaded = {"applied": (1, 4), "loading": None}
    both = {
        "a": loaded | {"info": engine(EngineState.PROVEN)},
        "b": loaded | {"info": engine(EngineState.LOADED)},
    }
    assert told(**both) == [[["a", 1, 4, "proven"], ["b", 1, 4, "loaded"]]]
    assert told(a={"info": engine(EngineState.WRONG)}) == [[["a", 1, 4, "wrong"]]]
    while not heard.of("explorer_died"):
        clock.at += 6
        second.update()
        daemon.tick()
    heard.events.clear()
    clock.at += 6
    first.update()
    daemon.tick()
    assert heard.of("versions_applied") == [{"explorers": [["a", 1, 4, "wrong"]]}], "it counted as dead"


def test_the_journal_has_each_version_that_ran_between_two_readings(job):
    clock = ManualClock()
    daemon, heard, _ = start(job, clock)
    daemon.tick()
    lanes = pytest.importorskip("syncd.parts.page.lanes").LaneCollector()
    with Synchronizer.open(job.root, "explorer", "e0") as sync:
        for first, last in ((1, 13), (13, 21)):
            for step in range(first, last):
                sync.confirm((1, step))
            clock.at += 6
            daemon.tick()
    clock.at += 6
    daemon.tick()
    for each in heard.events:
        lanes.add(each.name, each.at, each.fields)
    ((lane,), versions) = lanes.document()["lanes"], heard.of("versions_applied")
    assert [span[2:4] for span in lane["spans"]] == [[1, step] for step in range(1, 21)]
    assert all(span[0] <= (span[1] or clock.time()) for span in lane["spans"])
    assert lane["gone"] == "left"
    told = [row[2] for fields in versions for row in fields.get("recent", ())]
    assert told == list(range(1, 21)), "each once"


def test_an_idle_tick_builds_nothing_of_all_steps_again(job, monkeypatch):
    for step in (1, 2, 3):
        write_step(job, step)
    daemon, _, clock = start(job)
    for _ in range(3):
        daemon.tick()
        clock.at += 0.5
    steps = daemon.snapshot.steps
    monkeypatch.setattr(removals, "Links", None)
    daemon.tick()
    assert (daemon.error, daemon.snapshot.steps) == (None, steps)
    assert daemon.snapshot.steps is steps
