"""What wakes the daemon: real inotify on this machine's own file system."""

import os
import shutil
import threading
import time

import pytest

from syncd.daemon.wake import WakePipe, Watcher, choose_watch_mode
from syncd.protocol.layout import MARKER, Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.mount import Mount

LONG = 60.0
"""A bound that only a failing test reaches."""

TRIES = 60


@pytest.fixture
def pipe():
    pipe = WakePipe()
    yield pipe
    pipe.close()


@pytest.fixture
def watcher(tmp_path, pipe):
    watcher = Watcher(Job.at(tmp_path), SystemClock(), pipe, "events")
    yield watcher
    watcher.close()


def replace(path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def test_network_mounts_are_polled_unless_events_are_forced():
    assert choose_watch_mode(None, Mount("/", "nfs4"))[0] == "polling"
    assert choose_watch_mode(None, Mount("/", "fuse.sshfs"))[0] == "polling"
    assert choose_watch_mode(None, Mount("/", "lustre"))[0] == "polling"
    assert choose_watch_mode(None, Mount("/", "ext4"))[0] == "events"
    assert choose_watch_mode("events", Mount("/", "nfs4"))[0] == "events"


def test_a_replaced_marker_wakes_the_daemon(tmp_path, watcher):
    replace(tmp_path / MARKER, "1")
    assert watcher.wait(LONG)
    replace(tmp_path / MARKER, "2")
    assert watcher.wait(LONG)


def test_a_new_step_directory_wakes_the_daemon(tmp_path, watcher):
    (tmp_path / "global_step_1").mkdir()
    assert watcher.wait(LONG)


def test_reads_of_the_job_do_not_wake_the_daemon(tmp_path, watcher):
    (tmp_path / MARKER).write_text("1")
    while watcher.wait(0.3):
        pass
    for _ in range(20):
        os.close(os.open(tmp_path, os.O_RDONLY))
        (tmp_path / MARKER).read_text()
        os.listdir(tmp_path)
    assert not watcher.wait(0.5)


def test_a_step_moved_away_does_not_delay_the_next_marker(tmp_path, watcher):
    """The library pairs a move away with an arrival for half a second, and holds back all that follows."""
    (tmp_path / "global_step_1").mkdir()
    trash = tmp_path.parent / f"{tmp_path.name}-trash"
    trash.mkdir()
    while watcher.wait(0.3):
        pass
    waits = []
    # Held back, every single one takes half a second; a loaded machine is quick once in many tries.
    while len(waits) < TRIES and min(waits, default=1.0) > 0.4:
        number = len(waits)
        (tmp_path / f"global_step_{number + 2}").mkdir()
        assert watcher.wait(LONG)
        os.rename(tmp_path / f"global_step_{number + 2}", trash / str(number))
        started = time.monotonic()
        replace(tmp_path / MARKER, str(number))
        assert watcher.wait(LONG)
        waits.append(time.monotonic() - started)
    assert min(waits) < 0.4


def test_a_dead_emitter_is_rebuilt(tmp_path, pipe):
    root, rebuilt = tmp_path / "job", []
    root.mkdir()
    watcher = Watcher(Job.at(root), SystemClock(), pipe, "events", lambda: rebuilt.append(True))
    try:
        shutil.rmtree(root)
        for _ in range(50):
            watcher.wait(0.05)
        root.mkdir()
        ends = time.monotonic() + LONG
        while not rebuilt and time.monotonic() < ends:
            watcher.wait(0.05)
        assert rebuilt
        while watcher.wait(0.2):
            pass
        replace(root / MARKER, "7")
        assert watcher.wait(LONG)
    finally:
        watcher.close()


@pytest.fixture
def polling(tmp_path, pipe):
    watcher = Watcher(Job.at(tmp_path), SystemClock(), pipe, "polling")
    while watcher.wait(0.01):
        pass
    return watcher


def test_while_a_step_grows_a_polling_daemon_sees_changed_names_before_its_poll(tmp_path, polling):
    polling.note_unpublished(["attempt"])
    threading.Timer(0.05, replace, (tmp_path / MARKER, "1")).start()
    started = time.monotonic()
    assert polling.wait(LONG)
    assert time.monotonic() - started < LONG / 2


def test_a_polling_daemon_sees_changed_names_at_its_next_poll(tmp_path, polling):
    (tmp_path / "global_step_1").mkdir()
    assert polling.wait(0.01)
    assert polling.wait(0.01), "what changed within a tick of the server's clock must not be missed"
    assert not polling.wait(0.01)


def test_a_signal_wakes_a_polling_daemon(pipe, polling):
    threading.Timer(0.05, pipe.ring).start()
    assert polling.wait(LONG)


def test_a_job_that_cannot_be_read_is_left_to_the_scan(tmp_path, polling):
    tmp_path.rmdir()
    assert not polling.wait(0.05)


def test_repeated_changes_without_events_switch_to_polling(tmp_path, watcher):
    watcher.found_news()
    assert watcher.mode == "events"
    watcher.found_news()
    assert watcher.mode == "polling"


def test_changes_with_events_keep_the_events_mode(tmp_path, watcher):
    for number in range(4):
        replace(tmp_path / MARKER, str(number))
        assert watcher.wait(LONG)
        watcher.found_news()
    assert watcher.mode == "events"


def test_the_wake_pipe_wakes_once_from_another_thread(pipe):
    threading.Timer(0.05, pipe.ring).start()
    assert pipe.wait(LONG)
    assert not pipe.wait(0)


def test_a_full_wake_pipe_still_wakes_once(pipe):
    for _ in range(100_000):
        pipe.ring()
    assert pipe.wait(0)
    assert not pipe.wait(0)
