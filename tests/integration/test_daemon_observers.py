"""A real daemon heard by all its adapters: log, journal, endpoint, textfile, systemd."""

import errno
import json
import os
import signal
import socket
import subprocess
import urllib.request

import pytest
from support.cli import command, environment
from support.jobs import ManualClock, Recorder, explorer, write_step
from support.ports import free_port
from support.waiting import until

from syncd.config import DaemonConfig
from syncd.daemon.service import Daemon
from syncd.errors import StorageError
from syncd.observe.journal import read_events
from syncd.observe.metrics import Metrics
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term
from syncd.protocol.presence import TTL, RunningStatus
from syncd.protocol.writer import StepWriter

pytest.importorskip("prometheus_client")


def journal_has(job, name):
    return [item for item in read_events(job.events, 100) if item["event"] == name]


@pytest.fixture
def manager(tmp_path_factory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path_factory.mktemp("manager") / "notify"))
        listener.settimeout(0.1)
        yield listener


def heard(listener):
    lines = []
    while True:
        try:
            lines += listener.recv(4096).decode().splitlines()
        except TimeoutError:
            return lines


def test_daemon_events_reach_log_journal_metrics_and_systemd(tmp_path, tmp_path_factory, manager):
    job, port, textfile = Job.at(tmp_path), free_port(), tmp_path_factory.mktemp("prom") / "job.prom"
    args = command("watch", job.root, "--metrics-port", port, "--metrics-textfile", textfile)
    more = environment(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="2000000")
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=more) as process:
        try:
            until(lambda: journal_has(job, "leadership_acquired"))
            write_step(job, 1)
            until(lambda: journal_has(job, "version_published"))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                scraped = answer.read().decode()
            process.send_signal(signal.SIGHUP)
            until(lambda: journal_has(job, "config_reloaded"))
        finally:
            process.terminate()
            _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    logged = [json.loads(line)["event"] for line in err.splitlines()]
    written = [item["event"] for item in read_events(job.events, 100)]
    for name in (
        "daemon_started",
        "watch_mode_selected",
        "leadership_acquired",
        "version_published",
        "config_reloaded",
        "daemon_stopped",
    ):
        assert name in logged
        assert name in written
    assert f'syncd_version_step{{directory="{job.root}"}} 1.0' in scraped
    assert f'syncd_is_leader{{directory="{job.root}"}} 0.0' in textfile.read_text()
    told = heard(manager)
    assert told.count("READY=1") == 2, "at the start and after the reload"
    assert told.index("RELOADING=1") > told.index("READY=1")
    assert "STOPPING=1" in told
    assert "WATCHDOG=1" in told
    assert any(line.startswith("STATUS=step 1 published") for line in told)


def test_an_unwritable_journal_does_not_stop_the_daemon(tmp_path):
    job = Job.at(tmp_path)
    os.makedirs(f"{job.events}/not-a-file")
    write_step(job, 1)
    done = subprocess.run(
        command("watch", job.root, "--once"), capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert os.path.exists(job.version)


@pytest.fixture
def measured(tmp_path):
    """Return a job, a daemon that ticks by hand and its clock, and what one of its metrics is now."""
    job, clock, metrics = Job.at(tmp_path), ManualClock(), Metrics()
    daemon = Daemon(job, DaemonConfig(verify="header"), clock, metrics)
    return (
        job,
        clock,
        daemon,
        lambda name, **labels: metrics.registry.get_sample_value(
            f"syncd_{name}", {"directory": "", **labels}
        ),
    )


def test_the_lag_metric_follows_versions_and_ends_with_the_explorer(measured):
    job, clock, daemon, value = measured

    def lag():
        clock.sleep(6)
        daemon.tick()
        return value("explorer_lag_steps", explorer="e0")

    write_step(job, 1)
    daemon.tick()
    follower = explorer(job, clock, "e0", applied=(1, 1))
    assert lag() == 0
    for step in (2, 3):
        write_step(job, step)
        follower.beat()
        assert lag() == step - 1
    follower.update(applied=(1, 3))
    assert lag() == 0
    follower.update(applied=None)
    assert lag() is None
    follower.update(applied=(1, 3))
    assert lag() == 0
    follower.update(status=RunningStatus.STOPPED)
    assert lag() is None
    write_step(job, 4)
    assert lag() is None


def test_a_save_whose_directory_has_gone_is_no_filling_step(measured):
    job, clock, daemon, value = measured
    older, newer = (StepWriter(job, step, 2, "a1") for step in (20, 30))
    older.begin()
    newer.begin()
    daemon.tick()
    assert value("filling_step") == 30
    newer.discard()
    clock.sleep(daemon.config.reconcile)
    daemon.tick()
    assert value("filling_step") == 20
    older.discard()
    clock.sleep(daemon.config.reconcile)
    daemon.tick()
    assert value("filling_step") == -1


def test_a_daemon_that_leads_again_reports_all_that_are_there(measured):
    job, clock, daemon, value = measured
    write_step(job, 1)
    daemon.tick()
    follower = explorer(job, clock, "e0", applied=(1, 1))
    clock.sleep(6)
    daemon.tick()
    other = Daemon(job, DaemonConfig(verify="header"), clock, Recorder(), gone=lambda _: True)
    other.tick()
    assert other.leads
    clock.sleep(6)
    follower.beat()
    daemon.tick()
    assert not daemon.leads
    assert value("explorer_lag_steps", explorer="e0") is None
    other.close()
    daemon.tick()
    assert daemon.leads
    assert value("explorer_lag_steps", explorer="e0") == 0


def test_what_happens_while_a_publish_fails_is_reported_once_it_works(measured, monkeypatch):
    job, clock, daemon, value = measured
    write_step(job, 1)
    daemon.tick()
    explorer(job, clock, "e0", applied=(1, 1))
    clock.sleep(6)
    daemon.tick()
    assert value("explorer_lag_steps", explorer="e0") == 0
    write_step(job, 2)
    clock.sleep(TTL)
    with monkeypatch.context() as patched:
        patched.setattr(Term, "publish", full)
        daemon.tick()
    assert isinstance(daemon.error, StorageError)
    daemon.tick()
    assert value("explorer_lag_steps", explorer="e0") is None, "it died"


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
