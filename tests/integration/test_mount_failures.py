"""File systems that misbehave under a real daemon: frozen, without an answer, full, over a quota, read-only."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from beds import probe
from beds.loop import frozen, mounted
from beds.quota import limited
from beds.silent import silent
from support.documents import checked
from support.jobs import start, steps_of, write_step
from support.ports import free_port

from syncd.protocol.layout import Job
from syncd.protocol.leadership import latest_token
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.group("mounts"), pytest.mark.timeout(240)]

LIMIT = "9000000"
"""Of the watchdog, in microseconds: what does not come back within a third of it is stuck."""


class Watched:
    """A daemon under a service manager that listens."""

    def __init__(self, place, job, *options, before=()):
        self.job, self.place = job, place
        self.runtime = place / "run"
        self.runtime.mkdir(exist_ok=True)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(place / "notify"))
        self.manager.setblocking(False)
        os.chmod(place / "notify", 0o777)
        os.chmod(self.runtime, 0o777)
        self.told = []
        self.port = free_port()
        self.log = open(place / "log", "w+", encoding="utf-8")  # noqa: SIM115 - closed by `watched`
        command = [
            *before,
            sys.executable,
            "-m",
            "syncd",
            "watch",
            job.root,
            "--metrics-port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--log-format", "json", *options], stderr=self.log, env=self.environment()
        )

    def environment(self):
        return {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "NOTIFY_SOCKET": str(self.place / "notify"),
            "WATCHDOG_USEC": LIMIT,
        }

    def events(self, name):
        with open(self.place / "log", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.startswith("{") and line.endswith("\n")]
        return [line for line in lines if line["event"] == name]

    def states(self):
        return [event["state"] for event in self.events("mount_state_changed")]

    def metric(self, pattern):
        """Return the value of the one series that a pattern finds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return float(re.search(rf"^syncd_{pattern} (\S+)$", text, re.MULTILINE)[1])

    def state(self, name):
        return self.metric(f'mount_state{{.*state="{name}".*}}')

    def stuck_seconds(self):
        return self.metric("mount_stuck_seconds{.*}")

    def listen(self):
        """Return all that the manager was told so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told += self.manager.recv(65536).decode().splitlines()
        return self.told

    def pings(self):
        return self.listen().count("WATCHDOG=1")

    def status(self, *options):
        return subprocess.run(
            [sys.executable, "-m", "syncd", "status", self.job.root, *options],
            capture_output=True, text=True, timeout=60, check=False, env=self.environment(),
        )  # fmt: skip

    def published(self):
        return read_version(self.job)


@contextlib.contextmanager
def watched(place, job, *options, before=()):
    daemon = Watched(place, job, *options, before=before)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait(60)
        daemon.manager.close()
        daemon.log.close()


def until(holds, daemon, seconds=60.0):
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, (daemon.place / "log").read_text()[-3000:]
        time.sleep(0.05)


def publish(daemon, step):
    write_step(daemon.job, step)
    until(lambda: (found := daemon.published()) is not None and found.step == step, daemon)


@pytest.fixture
def place(tmp_path):
    """Return a directory with a short path: a socket's address has 108 letters."""
    made = tmp_path / "p"
    made.mkdir()
    os.chmod(made, 0o755)
    return made


@pytest.fixture
def ext4():
    if (reason := probe.loop_mount("ext4")) is not None:
        pytest.skip(reason)
    with mounted("ext4") as loop:
        os.mkdir(f"{loop.point}/job")
        yield loop


def test_a_frozen_disk_is_reported_and_the_daemon_resumes_after_the_thaw(ext4, place):
    with watched(place, Job.at(f"{ext4.point}/job")) as daemon:
        publish(daemon, 1)
        with frozen(ext4.point):
            until(lambda: "stuck" in daemon.states(), daemon)
            before = daemon.pings()
            assert daemon.state("stuck") == 1.0
            assert daemon.state("ok") == 0.0
            until(lambda: daemon.stuck_seconds() > 4, daemon)
            until(lambda: daemon.pings() >= before + 2, daemon)
            assert any(line.startswith("STATUS=stuck: write ") for line in daemon.listen())
            shown = daemon.status("--json")
            assert shown.returncode == 0, "what needs no write is looked at"
            problems = {item["name"]: item["detail"] for item in json.loads(shown.stdout)["problems"]}
            assert problems["mount"].startswith("stuck: ")
            assert "findmnt; dmesg" in problems["mount"]
        publish(daemon, 2)
        until(lambda: daemon.state("ok") == 1.0, daemon)
        assert daemon.stuck_seconds() == 0.0
        assert daemon.states() == ["stuck", "ok"], "each told once"
        assert latest_token(daemon.job) == 1, "by the same daemon"
        with open(daemon.job.events, encoding="utf-8") as file:
            assert any("returned after" in line for line in file), "the journal has how long it was"


@pytest.fixture
def silence():
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("silence")
def test_status_shows_the_last_known_state_on_a_mount_that_never_answers(place):
    os.mkdir(place / "job")
    with watched(place, Job.at(place / "job")) as daemon:
        publish(daemon, 1)
        with silent(daemon.job.root):
            until(lambda: "stuck" in daemon.states(), daemon)
            shown = daemon.status("--patience", "0.5", "--json")
            assert shown.returncode == 74, shown.stderr
            known = checked("stalled status", json.loads(shown.stdout))["known"]
            assert known["version"]["step"] == 1
            assert known["mount"]["state"] == "stuck"
            assert known["pid"] == daemon.process.pid
            assert known["runs"] is True
            assert "hint: findmnt;" in shown.stderr
            text = daemon.status("--patience", "0.5")
            assert (text.returncode, "stuck for" in text.stdout, "1.1" in text.stdout) == (74, True, True)
            nagios = daemon.status("--patience", "0.5", "--check")
            assert (nagios.returncode, nagios.stdout[:15]) == (2, "SYNCD CRITICAL ")
        publish(daemon, 2)
        until(lambda: daemon.state("ok") == 1.0, daemon)
        assert daemon.process.poll() is None
        with silent(daemon.job.root):
            until(lambda: daemon.states().count("stuck") == 2, daemon)
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(60) == 74, "it was not waited for"
            known = json.loads(daemon.status("--patience", "0.5", "--json").stdout)["known"]
            assert known["runs"] is False
        assert "the lead was not released" in (daemon.place / "log").read_text()
    with watched(place_of(place, "next"), daemon.job) as follower:
        publish(follower, 3)


def place_of(parent, name):
    made = parent / name
    made.mkdir()
    return made


def test_a_daemon_that_exits_normally_removes_its_host_file(place):
    os.mkdir(place / "job")
    with watched(place, Job.at(place / "job")) as daemon:
        publish(daemon, 1)
        until(lambda: list((daemon.runtime / "syncd").glob("*.json")), daemon)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert list((daemon.runtime / "syncd").iterdir()) == []


def test_a_read_only_remount_is_reported_and_the_daemon_resumes(ext4, place):
    def remount(how):
        command = ["mount", "-o", f"remount,{how}", ext4.point]
        until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, daemon)

    with watched(place, Job.at(f"{ext4.point}/job")) as daemon:
        publish(daemon, 1)
        remount("ro")
        until(lambda: "read_only" in daemon.states(), daemon)
        before = daemon.pings()
        until(lambda: daemon.pings() > before, daemon)
        assert daemon.state("read_only") == 1.0
        remount("rw")
        publish(daemon, 2)
        until(lambda: daemon.states() == ["read_only", "ok"], daemon)
        assert latest_token(daemon.job) == 1


def fill_bytes(root):
    with open(f"{root}/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def fill_inodes(root):
    os.mkdir(f"{root}/fillers")
    with contextlib.suppress(OSError):
        for number in range(100000):
            os.close(os.open(f"{root}/fillers/{number}", os.O_CREAT | os.O_WRONLY))


def empty(root):
    for path in (f"{root}/filler", f"{root}/fillers"):
        subprocess.run(["rm", "-rf", path], check=True, timeout=60)


CROWDED = {
    "full": ("size=4m", fill_bytes),
    "no_inodes": ("size=64m,nr_inodes=200", fill_inodes),
    "quota": (None, fill_bytes),
}
"""With which options a tmpfs is mounted, none where it is a btrfs with a quota; and what fills it."""


@contextlib.contextmanager
def small_tmpfs(options, point):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", point], check=True, timeout=60)


@pytest.fixture
def quota():
    """Make a directory with a real quota, and a job in it."""
    if (reason := probe.quota()) is not None:
        pytest.skip(reason)
    with limited("4M") as made:
        os.mkdir(f"{made.point}/job")
        os.chmod(f"{made.point}/job", 0o777)
        yield made


@pytest.fixture
def crowded(request, tmp_path):
    """Mount a small file system that belongs to nobody in particular."""
    options = CROWDED[request.param][0]
    if options is None:
        yield request.param, request.getfixturevalue("quota").point
        return
    if (reason := probe.tmpfs(options)) is not None:
        pytest.skip(reason)
    point = tmp_path / "mnt"
    point.mkdir()
    with small_tmpfs(options, point):
        os.mkdir(point / "job")
        os.chmod(point / "job", 0o777)
        yield request.param, str(point)


@pytest.mark.parametrize("crowded", CROWDED, indirect=True)
def test_a_full_disk_is_reported_once_and_the_daemon_resumes_with_space(crowded, place):
    state, point = crowded
    with watched(place, Job.at(f"{point}/job")) as daemon:
        publish(daemon, 1)
        CROWDED[state][1](f"{point}/job")
        until(lambda: state in daemon.states(), daemon)
        assert daemon.state(state) == 1.0
        assert daemon.events("mount_state_changed")[0]["hint"]
        again = daemon.pings()
        until(lambda: daemon.pings() >= again + 2, daemon)
        assert len(daemon.events("operation_failed")) == 1, "told once, however often it is tried again"
        empty(f"{point}/job")
        publish(daemon, 2)
        until(lambda: daemon.states() == [state, "ok"], daemon)


def problems(daemon):
    shown = daemon.status("--json")
    assert shown.returncode == 0, "nothing of it needs a write"
    return [item["detail"] for item in json.loads(shown.stdout)["problems"]]


def test_a_step_that_waits_for_quota_is_published_once_it_is_raised(quota, place):
    with watched(place, Job.at(f"{quota.point}/job")) as daemon:
        publish(daemon, 1)
        daemon.process.send_signal(signal.SIGSTOP)
        write_step(daemon.job, 2)
        fill_bytes(daemon.job.root)
        daemon.process.send_signal(signal.SIGCONT)
        until(lambda: "quota" in daemon.states(), daemon)
        assert daemon.state("quota") == 1.0
        (told,) = daemon.events("mount_state_changed")
        assert "the quota is used up" in told["detail"]
        assert told["hint"].startswith("quota -s; lfs quota -h ")
        # The daemon's file for `status` is written a moment after the log.
        until(lambda: any(one.startswith("quota: the quota is used up") for one in problems(daemon)), daemon)
        assert daemon.published().step == 1
        quota.limit("8M")
        until(lambda: daemon.published().step == 2, daemon)
        until(lambda: daemon.states() == ["quota", "ok"], daemon)
        assert daemon.state("ok") == 1.0
        assert latest_token(daemon.job) == 1, "by the same daemon"


def test_emptying_the_trash_after_its_grace_frees_a_used_up_quota(quota):
    """A step waits, so no tick gets as far as the trash."""
    job = Job.at(f"{quota.point}/job")
    daemon, heard, clock = start(job, keep_last=1, trash_grace=30)
    for step in (1, 2, 3):
        write_step(job, step)
        Path(f"{job.step(step)}/optimizer").write_bytes(bytes(1 << 20))
        daemon.tick(woken=True)
    assert steps_of(job) == [2, 3]
    write_step(job, 4)
    fill_bytes(job.root)
    clock.at += 20
    daemon.tick(woken=True)
    assert (daemon.trouble.state, read_version(job).step) == ("quota", 3)
    for _ in range(5):
        clock.at += 20
        daemon.tick()
    assert (daemon.trouble, daemon.leads) == (None, True)
    assert [event["state"] for event in heard.of("mount_state_changed")] == ["quota", "ok"]
    assert read_version(job).step == 4


class Filling(LocalDisk):
    """A disk that can be written to or not, and from which one can always delete."""

    error = 0

    def replace(self, path, data, **more):
        if self.error:
            raise OSError(self.error, os.strerror(self.error), path)
        super().replace(path, data, **more)

    def inodes(self, path):
        return 5


@pytest.mark.parametrize(("error", "state"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "quota")])
def test_the_trash_is_emptied_although_nothing_can_be_written(tmp_path, error, state):
    """Nothing can be written, so nothing can be published: what was removed before must not keep it so."""
    job = Job.at(tmp_path, disk=Filling())
    daemon, heard, clock = start(job, keep_last=1, trash_grace=30)
    for step in (1, 2, 3):
        write_step(job, step)
        daemon.tick(woken=True)
    assert steps_of(job) == [2, 3]
    (trash,) = Path(job.trash).glob("*/*")
    assert os.listdir(trash), "step 1 waits for its grace"
    write_step(job, 4)
    job.disk.error = error
    for _ in range(5):
        clock.at += 20
        daemon.tick()
    assert daemon.trouble.state == state
    assert os.listdir(trash) == []
    assert len(heard.of("operation_failed")) == len(heard.of("mount_state_changed")) == 1
    job.disk.error = 0
    clock.at += 20
    daemon.tick()
    assert (daemon.trouble, daemon.leads, read_version(job).step) == (None, True, 4)
    assert [event["state"] for event in heard.of("mount_state_changed")] == [state, "ok"]
