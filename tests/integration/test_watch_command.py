"""`syncd watch` as its users run it: real processes, signals, a stand-by, and jobs that others wrote."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.jobs import shard_bytes, steps_of, write_step
from support.waiting import until

from syncd.errors import StorageError
from syncd.observe.journal import read_events
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Leader, encode_leader, latest_token, token_name
from syncd.protocol.process import Process
from syncd.protocol.version import read_version


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@contextlib.contextmanager
def watching(job: Job, *options: str):
    command = [sys.executable, "-m", "syncd", "watch", job.root, "--log-level", "warning", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def published(job: Job) -> int:
    version = read_version(job)
    return version.step if version else -1


def write_foreign(job: Job, step: int, *, full: bool = False) -> None:
    """Write a step the way Trinity-RFT does: in place, the marker last and not atomically."""
    actor = f"{job.step(step)}/actor"
    os.makedirs(actor)
    if full:
        with open(f"{job.step(step)}/.full_checkpoint", "w"):
            pass
    with open(f"{actor}/model.safetensors", "wb") as file:
        file.write(shard_bytes({"w": (16, 16)}, step))
    with open(job.marker, "w") as file:
        file.write(str(step))


def test_sigterm_exits_with_0_and_a_standby_leads_at_once(job):
    write_step(job, 1)
    with watching(job) as first:
        until(lambda: published(job) == 1)
        with watching(job) as second:
            write_step(job, 2)
            until(lambda: published(job) == 2)
            assert latest_token(job) == 1, "the second one stands by"
            first.send_signal(signal.SIGTERM)
            assert first.wait(20) == 0
            until(lambda: latest_token(job) == 2)
            write_step(job, 3)
            until(lambda: published(job) == 3)
            second.send_signal(signal.SIGTERM)
            assert second.wait(20) == 0


def test_after_sigkill_the_next_daemon_leads_at_once(job):
    """The process is known to be gone from this host: nobody waits for a heartbeat to run out."""
    for number in range(1, 6):
        with watching(job, "--takeover", "300") as process:
            write_step(job, number)
            until(lambda: published(job) == number)  # noqa: B023 - it is called before the next round
            process.kill()
            process.wait(20)
    assert read_version(job).pair == (1, 5)


def test_a_daemon_that_starts_before_the_job_has_its_file_keeps_what_the_file_says(job):
    """Batch files start the daemon beside the trainer, which writes the file before its first step."""
    with watching(job, "--trash-grace", "0") as process:
        until(lambda: latest_token(job) == 1)
        process.send_signal(signal.SIGHUP)
        until(lambda: journal_has(job, "config_reloaded"))
        with open(f"{job.root}/config.toml", "w") as file:
            file.write("[daemon]\nkeep_last = 3\n")
        for number in range(1, 6):
            write_step(job, number)
            until(lambda: published(job) == number)  # noqa: B023 - it is called before the next round
        until(lambda: sorted(steps_of(job)) == [3, 4, 5])
        with open(job.events) as file:
            pruned = [line for line in file if "step_pruned" in line]
        assert len(pruned) == 2
        assert all("newest 3" in line for line in pruned), pruned


FAILING = """
import errno, os, sys
name, config, place = sys.argv[1:4]
real = getattr(os, name)
def call(path, *more, **options):
    if str(path) == config and os.path.exists(place):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)
    return real(path, *more, **options)
setattr(os, name, call)
from syncd.cli.main import run
sys.exit(run(sys.argv[4:]))
"""
"""`syncd` with a call that fails at the job's configuration while there is a file at a place."""


@contextlib.contextmanager
def watching_failing(job: Job, call: str, place: str):
    command = [sys.executable, "-c", FAILING, call, f"{job.root}/config.toml", place]
    with subprocess.Popen([*command, "watch", job.root, "--log-level", "error"]) as process:
        try:
            until(lambda: latest_token(job) == 1)
            yield process
        finally:
            process.kill()


def journal_has(job: Job, name: str) -> bool:
    return any(event["event"] == name for event in read_events(job.events, 1000))


@pytest.mark.parametrize("call", ["lstat", "open"])
def test_a_configuration_that_cannot_be_read_at_a_reload_leaves_the_old_one(job, tmp_path, call):
    """One EIO must not count as a job without a configuration: its protected steps would be removed."""
    with open(f"{job.root}/config.toml", "w") as file:
        file.write("[daemon]\nprune = false\n")
    with watching_failing(job, call, f"{tmp_path}/fails") as process:
        for number in range(1, 5):
            write_step(job, number)
        until(lambda: published(job) == 4)
        (tmp_path / "fails").touch()
        process.send_signal(signal.SIGHUP)
        until(lambda: journal_has(job, "config_rejected") or journal_has(job, "config_reloaded"))
        write_step(job, 5)
        until(lambda: published(job) == 5)
        (tmp_path / "fails").unlink()
        process.send_signal(signal.SIGHUP)
        until(lambda: journal_has(job, "config_reloaded"))
    assert steps_of(job) == [1, 2, 3, 4, 5]


def test_a_configuration_that_is_awaited_and_cannot_be_read_is_read_once_it_can(job, tmp_path):
    with watching_failing(job, "open", f"{tmp_path}/fails"):
        (tmp_path / "fails").touch()
        with open(f"{job.root}/config.toml", "w") as file:
            file.write("[daemon]\nprune = false\n")
        until(lambda: journal_has(job, "config_rejected"))
        (tmp_path / "fails").unlink()
        until(lambda: journal_has(job, "config_reloaded"))


@pytest.mark.parametrize("verb", [("prune",), ("watch", "--once"), ("ls",)])
def test_no_verb_takes_a_configuration_that_cannot_be_looked_at_for_none(job, tmp_path, verb):
    for number in range(1, 5):
        write_step(job, number)
    with open(f"{job.root}/config.toml", "w") as file:
        file.write("[daemon]\nprune = false\n")
    arguments = ["lstat", f"{job.root}/config.toml", str(tmp_path), verb[0], job.root, *verb[1:]]
    done = subprocess.run(
        [sys.executable, "-c", FAILING, *arguments], check=False, capture_output=True, timeout=60
    )
    assert done.returncode == StorageError.exit_code, done.stderr
    assert steps_of(job) == [1, 2, 3, 4]


def led_elsewhere(job: Job, beat: int) -> None:
    """Leave what a leader on another host leaves, alive or not."""
    place = f"{job.lock}/{token_name(max(latest_token(job), 1))}"
    os.makedirs(place, exist_ok=True)
    leader = Leader("elsewhere", "elsewhere", Process("another boot", "another", 1, 1), beat=beat)
    job.disk.replace(f"{place}/leader.json", encode_leader(leader))


def once(job: Job) -> int:
    command = [sys.executable, "-m", "syncd", "watch", job.root, "--once", "--takeover", "4"]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode


def test_watch_once_replaces_a_dead_leader_and_one_without_its_file(job):
    write_step(job, 1)
    led_elsewhere(job, 1)
    assert (once(job), published(job)) == (0, 1)
    write_step(job, 2)
    os.unlink(f"{job.lock}/{token_name(latest_token(job))}/leader.json")
    assert (once(job), published(job)) == (0, 2)


def test_watch_once_gives_way_to_a_live_leader_on_another_host(job):
    write_step(job, 1)
    led_elsewhere(job, 1)
    ended = threading.Event()

    def beat():
        for number in itertools.count(2):
            if ended.wait(0.5):
                return
            led_elsewhere(job, number)

    with ThreadPoolExecutor(1) as others:
        beating = others.submit(beat)
        try:
            assert (once(job), published(job)) == (5, -1)
        finally:
            ended.set()
        beating.result()


def test_a_foreign_job_is_published_and_kept_unchanged(job):
    with watching(job):
        for step in range(1, 6):
            write_foreign(job, step)
            until(lambda: published(job) == step)  # noqa: B023
    assert steps_of(job) == [1, 2, 3, 4, 5]
    assert read_version(job).layout.startswith("trinity")


def test_foreign_steps_are_pruned_with_prune_foreign(job):
    with watching(job, "--prune-foreign", "--keep-last", "1"):
        for step in range(1, 6):
            write_foreign(job, step, full=step == 2)
            until(lambda: published(job) == step)  # noqa: B023
        until(lambda: steps_of(job) == [2, 4, 5])


def test_watch_with_a_state_directory_writes_nothing_into_the_job(job, tmp_path):
    elsewhere = Job.at(job.root, tmp_path / "state")
    write_foreign(job, 1)
    before = sorted(os.listdir(job.root))
    with watching(job, "--state-dir", elsewhere.state):
        until(lambda: published(elsewhere) == 1)
        write_foreign(job, 2)
        until(lambda: published(elsewhere) == 2)
    assert sorted(os.listdir(job.root)) == sorted([*before, "global_step_2"])


@pytest.mark.group("mounts")
def test_a_job_on_a_read_only_mount_is_published(job, tmp_path):
    write_step(job, 1)
    write_foreign(job, 2)
    state = tmp_path / "state"
    mount = f"mount --bind {job.root} {job.root} && mount -o remount,ro,bind {job.root}"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && ! touch {job.root}/probe"],
        capture_output=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip("no mounts in a namespace of one's own here")
    watch = f"{sys.executable} -m syncd watch {job.root} --state-dir {state} --once"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {watch}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert published(Job.at(job.root, state)) == 2
