"""The shipped units on a machine that a real systemd has booted: from a wheel, as their own user, sandboxed.

One machine serves all tests. What differs from the shipped units is in a drop-in, as a user would write it: the
times, so that nothing takes a minute.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from beds import probe
from beds.machine import booted
from support import installed
from support.jobs import write_step

from syncd.protocol.layout import Job
from syncd.protocol.leadership import latest_token
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.group("systemd"), pytest.mark.beds, pytest.mark.timeout(300)]

UNIT, FOLLOWER = "syncd@ckpt-job.service", "syncd-follow@ckpt-job.service"
PYTHON = "/opt/syncd/bin/python"

SETUP = """
install_units() { PYTHON -P -m syncd install-units "$@"; }
for at in OPEN; do chmod o+x "$at"; done
install_units
systemd-sysusers
mkdir -p /srv/export/job /ckpt /etc/systemd/system/syncd@.service.d /etc/systemd/system/bed.target.wants
chown syncd:syncd /srv/export/job
cat >/etc/systemd/system/ckpt.mount <<'END'
[Mount]
What=/srv/export
Where=/ckpt
Type=none
Options=bind
END
printf '[Service]\\nWatchdogSec=2\\nTimeoutAbortSec=1\\nRestartSec=0.1\\n' \\
  >/etc/systemd/system/syncd@.service.d/quick.conf
echo 'SYNCD_OPTIONS=--metrics-port 9400 --log-format json' >/etc/syncd/syncd@ckpt-job.env
# What `systemctl enable` does for multi-user.target.
ln -s /etc/systemd/system/syncd@.service /etc/systemd/system/bed.target.wants/UNIT
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return installed.install(tmp_path_factory.mktemp("installed"), "/opt/needed")


@pytest.fixture(scope="module")
def machine(environment):
    if (reason := probe.systemd()) is not None:
        pytest.skip(reason)
    python = os.path.realpath(sys.executable)
    shown = [(str(environment), "/opt/syncd"), (installed.NEEDED, "/opt/needed")]
    if os.stat(sys.base_prefix).st_dev != os.stat("/").st_dev:
        shown.append((sys.base_prefix, sys.base_prefix))
    there = " ".join(f"'{parent}'" for parent in Path(python).parents)
    setup = SETUP.replace("PYTHON", PYTHON).replace("OPEN", there).replace("UNIT", UNIT)
    with booted(*shown, setup=setup) as machine:
        yield machine


@pytest.fixture
def job(machine):
    """Return the job as this host sees it, with its daemon at work and no configuration of its own."""
    root = machine.path("/ckpt/job")
    job = Job(root, f"{root}/.syncd", LocalDisk())  # `Job.at` would resolve the way into the machine
    with_config(machine, None)
    if machine.get(UNIT, "ActiveState") != "active":
        machine.try_("systemctl", "reset-failed", UNIT)
        machine.run("systemctl", "start", UNIT)
    machine.until(lambda: "published" in machine.get(UNIT, "StatusText"), UNIT)
    return job


def with_config(machine, text):
    """Give the job a configuration, or none."""
    place = machine.path("/srv/export/job/config.toml")
    if text is None:
        if os.path.exists(place):
            os.unlink(place)
    else:
        machine.write("/srv/export/job/config.toml", text)


def publish(machine, job, step):
    """Write a step as the job's owner would, and wait until the daemon has published it."""
    write_step(job, step)
    machine.try_("chown", "-R", "syncd:syncd", "/srv/export/job")  # an older step may go meanwhile
    machine.until(lambda: (found := read_version(job)) is not None and found.step == step, UNIT)


def next_step(job):
    found = read_version(job)
    return 1 if found is None else found.step + 1


def events(job, name):
    with open(job.events, encoding="utf-8") as file:
        return [event for event in map(json.loads, file) if event["event"] == name]


def when(machine, unit, name):
    return int(machine.get(unit, f"{name}TimestampMonotonic"))


def test_at_boot_the_daemon_starts_after_its_mount_and_becomes_ready(machine, record_line):
    machine.until(lambda: machine.get(UNIT, "ActiveState") == "active", UNIT)
    assert machine.show(UNIT, "NRestarts", "Result") == {"NRestarts": "0", "Result": "success"}
    assert machine.show(UNIT, "Type", "NotifyAccess") == {"Type": "notify", "NotifyAccess": "main"}
    assert "/ckpt/job" in machine.get(UNIT, "RequiresMountsFor").split()
    mounted = when(machine, "ckpt.mount", "ActiveEnter")
    began, ready = when(machine, UNIT, "InactiveExit"), when(machine, UNIT, "ActiveEnter")
    assert 0 < mounted <= began < ready
    record_line(f"systemd: the daemon is ready {(ready - began) / 1e3:.0f} ms after its start")


def test_systemd_logs_no_warning_about_the_units(machine, job):
    complaints = machine.run("journalctl", "--no-pager", "-o", "cat", "_PID=1", "-p", "warning")
    assert not re.search("syncd.*(Unknown|Failed to parse|ignoring|deprecated)", complaints), complaints


def test_systemctl_status_shows_step_explorers_and_lag(machine, job):
    step = next_step(job)
    publish(machine, job, step)
    wanted = f"step {step} published, 0 explorers, lag 0"
    machine.until(lambda: machine.get(UNIT, "StatusText") == wanted, UNIT)
    assert wanted in machine.run("systemctl", "status", "--no-pager", UNIT)


def test_the_daemon_runs_as_its_own_user_and_can_write_only_its_job(machine, job):
    pid = machine.get(UNIT, "MainPID")
    assert machine.run("ps", "-o", "user=", "-p", pid).strip() == "syncd"
    inside = ["nsenter", "-t", pid, "-m", "--"]
    machine.run(*inside, "runuser", "-u", "syncd", "--", "touch", "/ckpt/job/own")
    for place in ("/etc/x", "/usr/x", "/boot/x"):
        refused = machine.try_(*inside, "touch", place)
        assert "Read-only file system" in refused.stderr, place
    for place in ("/srv/x", "/root/x", "/var/x", "/x"):
        refused = machine.try_(*inside, "runuser", "-u", "syncd", "--", "touch", place)
        assert "Permission denied" in refused.stderr, place
    status = machine.run("cat", f"/proc/{pid}/status")
    assert re.search(r"NoNewPrivs:\t1\n", status)
    assert re.search(r"CapBnd:\t0+\n", status)
    assert re.search(r"Seccomp:\t2\n", status)


def test_metrics_are_served_on_loopback(machine, job):
    publish(machine, job, next_step(job))
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/metrics', timeout=20).read().decode())"
    assert "syncd_" in machine.run(PYTHON, "-c", ask)


def test_the_watchdog_replaces_a_suspended_daemon(machine, job):
    before = machine.show(UNIT, "MainPID", "NRestarts")
    token = latest_token(job)
    machine.run("kill", "-STOP", before["MainPID"])
    machine.until(lambda: machine.get(UNIT, "NRestarts") != before["NRestarts"], UNIT)
    machine.until(lambda: machine.get(UNIT, "ActiveState") == "active", UNIT)
    assert "Failed with result 'watchdog'" in machine.journal(UNIT)
    publish(machine, job, next_step(job))
    assert latest_token(job) > token
    assert machine.get(UNIT, "MainPID") != before["MainPID"]


def test_a_killed_daemon_is_restarted_and_leads_at_once(machine, job):
    before, token = machine.show(UNIT, "MainPID", "NRestarts"), latest_token(job)
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)
    publish(machine, job, next_step(job))
    assert latest_token(job) == token + 1
    assert int(machine.get(UNIT, "NRestarts")) == int(before["NRestarts"]) + 1


def test_a_unit_with_a_missing_job_directory_is_restarted_until_it_exists(machine, job):
    """A job directory that is not there: a mount that somebody makes later."""
    unit = "syncd@srv-later.service"
    machine.try_("systemctl", "start", unit)
    machine.until(lambda: int(machine.get(unit, "NRestarts")) > 5, unit)
    assert machine.show(unit, "ExecMainStatus", "SubState")["ExecMainStatus"] in {"74", "0"}
    assert "the job directory does not exist" in machine.journal(unit)
    machine.run("install", "-d", "-o", "syncd", "/srv/later")
    machine.until(lambda: machine.get(unit, "ActiveState") == "active", unit)
    machine.run("systemctl", "stop", unit)


def test_reload_applies_the_configuration_in_the_same_process(machine, job):
    pid, before = machine.get(UNIT, "MainPID"), len(events(job, "config_reloaded"))
    with_config(machine, "[daemon]\nkeep_last = 7\n")
    machine.run("systemctl", "reload", UNIT)
    machine.until(lambda: machine.get(UNIT, "ActiveState") == "active", UNIT)
    machine.until(lambda: len(events(job, "config_reloaded")) > before, UNIT)
    assert machine.get(UNIT, "MainPID") == pid


def test_a_reload_with_a_bad_configuration_keeps_the_daemon_running(machine, job):
    pid, refused = machine.get(UNIT, "MainPID"), len(events(job, "config_rejected"))
    with_config(machine, "[daemon]\nkeep_lost = 7\n")
    machine.run("systemctl", "reload", UNIT)
    machine.until(lambda: len(events(job, "config_rejected")) > refused, UNIT)
    publish(machine, job, next_step(job))
    assert machine.get(UNIT, "MainPID") == pid


def test_stop_exits_with_0_and_stops_the_daemon_cleanly(machine, job):
    machine.run("systemctl", "stop", UNIT)
    shown = machine.show(UNIT, "ActiveState", "Result", "ExecMainStatus", "ExecMainCode")
    assert shown == {
        "ActiveState": "inactive",
        "Result": "success",
        "ExecMainStatus": "0",
        "ExecMainCode": "1",
    }
    assert events(job, "daemon_stopped")


@pytest.mark.parametrize(
    ("config", "options", "code"),
    [("[daemon]\nkeep_last = 0\n", "", "78"), (None, "--nonsense", "2")],
    ids=["configuration", "usage"],
)
def test_configuration_and_usage_errors_are_not_restarted(machine, job, config, options, code):
    machine.run("systemctl", "stop", UNIT)
    with_config(machine, config)
    kept = Path(machine.path("/etc/syncd/syncd@ckpt-job.env")).read_text()
    machine.write("/etc/syncd/syncd@ckpt-job.env", f"SYNCD_OPTIONS={options}\n")
    try:
        assert machine.try_("systemctl", "start", UNIT).returncode != 0
        shown = machine.show(UNIT, "ActiveState", "SubState", "ExecMainStatus", "NRestarts")
        assert shown == {
            "ActiveState": "failed",
            "SubState": "failed",
            "ExecMainStatus": code,
            "NRestarts": "0",
        }
        assert "error: " in machine.journal(UNIT)
    finally:
        machine.write("/etc/syncd/syncd@ckpt-job.env", kept)


def test_the_mount_is_stopped_after_the_daemon_and_started_with_it(machine, job):
    machine.run("systemctl", "stop", "ckpt.mount")
    assert machine.show(UNIT, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert when(machine, UNIT, "InactiveEnter") <= when(machine, "ckpt.mount", "InactiveEnter")
    machine.run("systemctl", "start", UNIT)
    assert machine.get("ckpt.mount", "ActiveState") == "active"
    publish(machine, job, next_step(job))


def test_the_daemon_uses_another_file_system_mounted_by_hand(machine, job):
    """Nothing of the sandbox may hold the old one: it would be watched for ever."""
    publish(machine, job, next_step(job))
    machine.run("umount", "/ckpt")
    machine.run("mount", "-t", "tmpfs", "other", "/ckpt")
    machine.run("install", "-d", "-o", "syncd", "/ckpt/job")
    try:
        assert read_version(job) is None
        write_step(job, 1000)
        machine.try_("chown", "-R", "syncd:syncd", "/ckpt/job")
        machine.until(lambda: (found := read_version(job)) is not None and found.step == 1000, UNIT)
    finally:
        machine.run("systemctl", "stop", UNIT)
        machine.run("umount", "/ckpt")


def test_a_suspended_daemon_can_be_stopped(machine, job):
    machine.run("kill", "-STOP", machine.get(UNIT, "MainPID"))
    machine.run("systemctl", "stop", UNIT)
    assert machine.get(UNIT, "ActiveState") in {"inactive", "failed"}
    machine.run("systemctl", "start", UNIT)
    publish(machine, job, next_step(job))


@pytest.fixture
def by_hand(machine):
    """Return what runs a command of the user syncd, who is not root, with a service manager of its own."""
    user = machine.run("id", "-u", "syncd").strip()
    machine.run("systemctl", "start", f"user@{user}.service")
    its = [f"XDG_RUNTIME_DIR=/run/user/{user}", "HOME=/var/lib/syncd"]
    yield lambda *command: machine.run("runuser", "-u", "syncd", "--", "env", *its, *command)
    machine.run("systemctl", "stop", f"user@{user}.service")


def test_the_user_unit_runs_the_daemon_without_root(machine, by_hand):
    unit = "syncd-user@srv-mine.service"
    machine.run("install", "-d", "-o", "syncd", "/srv/mine")
    said = by_hand(PYTHON, "-P", "-m", "syncd", "install-units", "--user")
    assert "/var/lib/syncd/.config/systemd/user/syncd-user@.service: new" in said
    by_hand("systemctl", "--user", "daemon-reload")
    by_hand("systemctl", "--user", "enable", "--now", unit)

    def shown(*names):
        lines = by_hand("systemctl", "--user", "show", unit, *(f"-p{name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    wanted = "nothing published yet, 0 explorers, lag 0"
    machine.until(lambda: shown("StatusText")["StatusText"] == wanted)
    assert shown("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    assert wanted in by_hand("systemctl", "--user", "status", unit)
    by_hand("systemctl", "--user", "reload", unit)
    by_hand("systemctl", "--user", "disable", "--now", unit)
    assert shown("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}


def test_the_follower_unit_passes_its_settings_and_its_secret(machine, job):
    show = """/bin/sh -c 'echo "options: $*; secret: <$(cat $CREDENTIALS_DIRECTORY/hook-token)>"; sleep 600' sh"""
    drop_in = f"[Service]\nExecStart=\nExecStart={show} $SYNCD_FOLLOW_OPTIONS\n"
    machine.write("/etc/systemd/system/syncd-follow@.service.d/show.conf", drop_in)
    machine.write(
        "/etc/syncd/follow.env",
        "SYNCD_FOLLOW_OPTIONS=--hook vllm=http://127.0.0.1:1 --stage /dev/shm/syncd\n",
    )
    machine.run("systemctl", "daemon-reload")
    told = "options: --hook vllm=http://127.0.0.1:1 --stage /dev/shm/syncd; secret: <"
    for secret in ("", "of-this-host"):
        if secret:
            machine.write("/etc/credstore/hook-token", secret)
        machine.run("systemctl", "restart", FOLLOWER)
        machine.until(
            lambda wanted=f"{told}{secret}>": wanted in machine.journal(FOLLOWER).splitlines(), FOLLOWER
        )
    assert "of-this-host" not in machine.run("systemctl", "show", FOLLOWER)
    pid = machine.get(FOLLOWER, "MainPID")
    machine.run(
        "nsenter", "-t", pid, "-m", "--", "runuser", "-u", "syncd", "--", "touch", "/dev/shm/syncd/staged"
    )
    machine.run("systemctl", "stop", FOLLOWER)
    machine.run("systemctl", "stop", UNIT)
    machine.run("test", "-e", "/dev/shm/syncd/staged")


def test_a_stopped_daemon_leaves_no_process(machine, job):
    machine.run("systemctl", "stop", UNIT)
    left = machine.try_("pgrep", "-u", "syncd")
    assert (left.returncode, left.stdout) == (1, "")


def test_the_wheel_installs_unit_files(environment, tmp_path):
    command = [f"{environment}/bin/python", "-P", "-m", "syncd", "install-units", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60, env={})
    assert done.returncode == 0, done.stderr
    unit = (tmp_path / "systemd/system/syncd@.service").read_text()
    assert f"ExecStart={environment}/bin/python -P -m syncd watch " in unit
    assert (tmp_path / "sysusers.d/syncd.conf").is_file()
    assert (tmp_path / "tmpfiles.d/syncd.conf").is_file()
