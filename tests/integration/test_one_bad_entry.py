"""One entry that this code does not cope with costs itself only: a tree of any depth, a bug that nobody knows."""

import os
from functools import partial

import pytest
from support.jobs import start, steps_of, write_step

from syncd.daemon import examine, removals, scan_steps, service, trash
from syncd.errors import REPOSITORY
from syncd.observe import event_names
from syncd.protocol.disk import remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk

MINUTE = 61.0


def dig(path, levels, name="level"):
    """Make a tree so deep that neither recursion nor a path reaches its end, with a file at each end of it."""
    os.makedirs(path)
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    job = Job.at(tmp_path / "job")
    yield job
    remove_tree(LocalDisk(), job.root)  # what pytest would do recurses


@pytest.mark.parametrize("name", ["d", "level", "x" * 255])
def test_a_tree_of_any_depth_is_removed(tmp_path, name):
    (tmp_path / "outside").mkdir()
    dig(f"{tmp_path}/tree", 1500, name)
    os.symlink(tmp_path / "outside", f"{tmp_path}/tree/link")
    assert remove_tree(LocalDisk((str(tmp_path),)), f"{tmp_path}/tree") == 1501
    assert os.listdir(tmp_path) == ["outside"]


def test_deep_trees_stop_neither_ticks_nor_the_emptying_of_the_trash(job, shell):
    for step in (1, 2, 3):
        write_step(job, step, full=step == 2)
    for place in (f"{job.step(1)}/deep", f"{job.step(2)}/training", f"{job.root}/.global_step_4.abc/actor"):
        dig(place, 1500)
    daemon, heard, clock = start(job, keep_last=1, keep_previous=False, trash_grace=1.0)
    for _ in range(3):
        daemon.tick()
        clock.at += MINUTE
    assert (daemon.error, steps_of(job), daemon.removals.trash_left) == (None, [2, 3], 0)
    assert event_names.TRASH_EMPTIED in heard.names()
    daemon.close()
    for verb in ("status", "ls", "watch"):
        done = shell(verb, job.root, "--once" if verb == "watch" else "--json")
        assert done.code == 0, done.err


def raising(error, applies, real):
    """Return a function that raises where `applies` says so of its arguments, and does the real thing elsewhere."""

    def call(*args, **options):
        if applies(*args):
            raise error
        return real(*args, **options)

    return call


def test_a_bug_met_at_one_step_costs_that_step_and_ends_when_it_does(job, monkeypatch):
    for step in (1, 2):
        write_step(job, step)
    daemon, heard, clock = start(job)
    real = scan_steps.examine_native
    with monkeypatch.context() as patch:
        broken = raising(KeyError("shape"), lambda _disk, _root, step, _before: step == 2, real)
        patch.setattr(scan_steps, "examine_native", broken)
        for _ in range(3):
            daemon.tick(woken=True)
        assert daemon.error is None
        assert daemon.snapshot.version.step == 1
        assert [event["step"] for event in heard.of(event_names.STEP_DAMAGED) if "step" in event] == [2]
        assert all(word in daemon.snapshot.steps[2].problem for word in ("KeyError", "bug", REPOSITORY))
        clock.at += 10 * 3600
        daemon.tick()
        assert steps_of(job) == [1, 2], "what a bug cannot read is not removed"
    daemon.tick(woken=True)
    assert daemon.snapshot.version.step == 2


def test_a_bug_met_while_a_step_is_verified_costs_that_step_until_the_next_full_scan(job, monkeypatch):
    for step in (1, 2):
        write_step(job, step)
    daemon, heard, clock = start(job)
    with monkeypatch.context() as patch:
        broken = raising(TypeError("frame"), lambda _job, step, *_: step.step == 2, service.problems_of)
        patch.setattr(service, "problems_of", broken)
        for _ in range(4):
            daemon.tick(woken=True)
        assert daemon.snapshot.version.step == 1
        assert (
            len([event for event in heard.of(event_names.STEP_DAMAGED) if "TypeError" in str(event)]) <= 2
        ), "not at each tick"
    clock.at += MINUTE
    daemon.tick()
    assert daemon.snapshot.version.step == 2


def test_an_attempt_that_meets_a_bug_is_shown_and_the_rest_goes_on(job, monkeypatch):
    write_step(job, 1)
    os.makedirs(f"{job.root}/.global_step_2.abc/actor")
    monkeypatch.setattr(examine, "tree_stats", raising(RecursionError("deep"), lambda *_: True, None))
    daemon, heard, _ = start(job)
    daemon.tick()
    daemon.tick()
    assert (daemon.error, daemon.snapshot.version.step) == (None, 1)
    assert (
        len(
            [
                event
                for event in heard.of(event_names.ENTRY_READ_FAILED)
                if "RecursionError" in event["detail"]
            ]
        )
        == 1
    )


def test_a_tick_that_fails_by_a_bug_says_so_once_and_the_next_one_works(job, monkeypatch):
    write_step(job, 1)
    daemon, heard, _ = start(job)
    with monkeypatch.context() as patch:
        patch.setattr(service, "plan", raising(ZeroDivisionError("by 0"), lambda *_: True, service.plan))
        assert daemon.tick() < daemon.tick()
        [event] = heard.of(event_names.OPERATION_FAILED)
        assert event["code"] == "bug"
        assert "ZeroDivisionError" in event["detail"]
        assert "_verified_plan" in event["calls"]
    daemon.tick()
    assert (daemon.error, daemon.snapshot.version.step) == (None, 1)
    assert event_names.JOB_RECOVERED in heard.names()


def test_an_entry_of_the_trash_that_meets_a_bug_costs_itself_only(job, monkeypatch):
    for step in range(1, 4):
        write_step(job, step)
    daemon, heard, clock = start(job, keep_last=1, keep_previous=False, trash_grace=1.0)
    is_first = partial(lambda _disk, path: "global_step_1." in path)
    with monkeypatch.context() as patch:
        patch.setattr(trash, "remove_tree", raising(MemoryError("no"), is_first, trash.remove_tree))
        for _ in range(4):
            daemon.tick()
            clock.at += MINUTE
        assert (daemon.error, daemon.removals.trash_left) == (None, 1)
        [event] = heard.of(event_names.ENTRY_MOVE_FAILED)
        assert "global_step_1." in event["path"]
        assert "MemoryError" in event["detail"]
        assert daemon.removals.entry_problem is not None
    daemon.tick()
    assert (daemon.removals.trash_left, daemon.removals.entry_problem) == (0, None)


def test_a_bug_of_the_sweep_does_not_stop_the_emptying(job, monkeypatch):
    for step in (1, 2):
        write_step(job, step)
    daemon, heard, clock = start(job, keep_last=1, keep_previous=False, trash_grace=1.0)
    monkeypatch.setattr(removals, "is_temporary", raising(KeyError("name"), lambda *_: True, None))
    (job.disk.make_directory(job.pins), job.disk.replace(f"{job.pins}/stray", b""))
    for _ in range(3):
        daemon.tick()
        clock.at += MINUTE
    assert daemon.removals.trash_left == 0
    assert [event["code"] for event in heard.of(event_names.OPERATION_FAILED)] == ["bug"]
