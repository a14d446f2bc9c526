"""From an error to the state of a file system; calls in hand; what a host's daemons say beside the mount."""

import errno
import json
import os
import threading
import time

import pytest
from support.jobs import ManualClock

from syncd.errors import CorruptDataError, JobMissingError, JobReplacedError, StuckError, storage_error
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.mount import PATIENT, MountState, mount_trouble, mount_trouble_of
from syncd.stall import host_state
from syncd.stall.calls import PendingCalls, TrackedDisk
from syncd.stall.worker import StallGuard
from syncd.views.job_view import JobViewer
from syncd.views.problems import problems


def failed(number):
    return storage_error(OSError(number, os.strerror(number), "/j/x"), "/j")


@pytest.mark.parametrize(
    ("error", "inodes", "state"),
    [
        (failed(errno.ENOSPC), None, "full"),
        (failed(errno.ENOSPC), 7, "full"),
        (failed(errno.ENOSPC), 0, "no_inodes"),
        (failed(errno.EDQUOT), 0, "quota"),
        (failed(errno.EROFS), None, "read_only"),
        (failed(errno.ESTALE), None, "stale"),
        (failed(errno.EIO), None, "failing"),
        (failed(errno.EACCES), None, "failing"),
        (JobMissingError("gone"), None, "missing"),
        (JobReplacedError("another"), None, "replaced"),
    ],
)
def test_each_storage_error_maps_to_a_mount_state(error, inodes, state):
    found = mount_trouble_of(error, "/j", inodes)
    assert found is not None
    assert found.state == state
    assert str(error) in found.message


def test_other_errors_map_to_no_mount_state():
    assert mount_trouble_of(CorruptDataError("half a document"), "/j") is None


@pytest.mark.parametrize("state", [state for state in MountState if state is not MountState.OK])
def test_every_mount_state_has_a_message_and_a_command(state):
    said = mount_trouble(state, "/my jobs/a")
    if state is MountState.STUCK:
        assert "/my jobs" not in said.hint, "what asks the mount would hang, too"
    else:
        assert "'/my jobs/a'" in said.hint, "a hint can be pasted"
    assert "{" not in said.message + said.hint
    assert not said.message.endswith(".")


def test_the_daemon_is_patient_in_every_state_that_a_restart_cannot_end():
    assert set(MountState) - PATIENT == {MountState.OK, MountState.REPLACED, MountState.FAILING}


def test_disk_calls_are_pending_while_they_run(tmp_path):
    clock = ManualClock()
    in_hand, seen = PendingCalls(clock), []

    class Looking(LocalDisk):
        def read(self, path, limit=9):
            clock.at += 12
            seen.append((str(in_hand.oldest()), in_hand.age(in_hand.oldest())))
            return super().read(path, limit)

    with pytest.raises(FileNotFoundError):
        TrackedDisk(Looking(), in_hand).read(f"{tmp_path}/none")
    assert seen == [(f"read {tmp_path}/none", 12.0)]
    assert in_hand.oldest() is None, "also after an error"


def test_the_oldest_pending_call_of_all_threads_is_found():
    clock, go, there = ManualClock(), threading.Event(), threading.Event()
    in_hand = PendingCalls(clock)

    def wait():
        with in_hand("list", "/slow"):
            there.set()
            go.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    assert there.wait(20)
    clock.at += 1
    with in_hand("stat", "/quick"):
        assert in_hand.oldest().path == "/slow"
        assert in_hand.oldest(threading.get_ident()).path == "/quick"
    go.set()
    thread.join(20)
    assert in_hand.oldest() is None


def test_a_hung_call_is_abandoned_and_awaited_by_the_next_one():
    clock, go = SystemClock(), threading.Event()
    in_hand = PendingCalls(clock)
    guard = StallGuard(in_hand, clock, 0.05)

    def hang():
        with in_hand("stat", "/dead"):
            go.wait(20)

    for work in (hang, lambda: 1):
        with pytest.raises(StuckError, match="has not answered") as caught:
            guard(work)
        assert caught.value.exit_code == 74
    go.set()
    assert guard(lambda: 2) == 2
    with pytest.raises(KeyError):
        guard(lambda: {}["none"])


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    return tmp_path


def test_the_host_file_of_a_daemon_is_found_by_the_job_path(runtime, tmp_path):
    writer = host_state.Writer("/really/j\udcff", "/link/j")
    writer.write(5.0, {"status": "well", "job": "/really/j\udcff"})
    for name in ("/really/j\udcff", "/link/j", "/link/../link/j/"):
        found = host_state.find(name)
        assert (found.at, found.document["status"], found.is_current) == (5.0, "well", True)
    assert host_state.find("/other/j") is None
    writer.remove()
    assert host_state.find("/really/j\udcff") is None


def test_old_host_files_of_killed_daemons_are_removed_at_a_start(runtime):
    host_state.Writer("/old").write(1.0, {})
    host_state.Writer("/here").write(time.time(), {})
    for name in ("/old", "/here"):
        path = host_state._path(host_state.own_directory(), name)
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        document["process"] |= {"started": document["process"]["started"] + 1}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    host_state.Writer("/new")
    assert host_state.find("/old") is None
    assert host_state.find("/here").is_current is False


def test_a_report_from_before_a_reboot_says_nothing_of_the_mount_now(runtime, tmp_path):
    job = Job.at(tmp_path)
    host_state.Writer(job.root).write(1.0, {"mount": {"state": "stuck", "detail": "d", "hint": "h"}})
    assert "mount" in problem_names(job)
    path = host_state._path(host_state.own_directory(), job.root)
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    document["process"] |= {"boot": "the one before"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)
    assert "mount" not in problem_names(job)


def problem_names(job):
    return {name for name, _ in problems(JobViewer(job, SystemClock()).read())}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"protocol":1}', b'{"protocol":1,"at":"x"}'])
def test_a_damaged_host_file_is_ignored(runtime, content):
    host_state.Writer("/j").write(1.0, {})
    (path,) = (runtime / "syncd").iterdir()
    path.write_bytes(content)
    assert host_state.find("/j") is None


def test_the_host_file_directory_follows_from_the_environment(monkeypatch):
    assert (
        host_state.own_directory({"RUNTIME_DIRECTORY": "/run/syncd/j", "XDG_RUNTIME_DIR": "/x"})
        == "/run/syncd/j"
    )
    assert host_state.own_directory({"XDG_RUNTIME_DIR": "/x"}) == "/x/syncd"
    assert str(os.getuid()) in host_state.own_directory({})
