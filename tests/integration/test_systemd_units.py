"""`syncd install-units`, and what systemd's own tools say of what it writes; nothing is booted."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from syncd.cli.install_units import UnitRequest, closed_directory, quoted, rendered
from syncd.config import DaemonConfig

UNITS = Path(__file__).parents[2] / "systemd"
MOST_EXPOSED = 2.0

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def installed(shell, tmp_path):
    """Return the directory of the units that an installation has written."""
    for options in ([], ["--user"]):
        done = shell("install-units", "--dir", tmp_path, "--engine", "e1", *options)
        assert done.code == 0, done.err
    return tmp_path / "systemd"


def analyze(*words, **more):
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **more,
    )
    return done.returncode, done.stdout, done.stderr


@needs_systemd
@pytest.mark.parametrize("name", ["syncd", "syncd-follow", "syncd-follow-e1", "syncd-mirror"])
def test_systemd_analyze_accepts_the_system_units(installed, name):
    shown = installed / "system" / f"{name}@ckpt-job.service"
    shown.symlink_to(installed / "system" / f"{name}@.service")
    assert analyze("verify", "--man=no", shown) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", ["syncd-user", "syncd-follow-user", "syncd-follow-user-e1"])
def test_systemd_analyze_accepts_the_user_units(installed, name, tmp_path):
    shown = installed / "user" / f"{name}@ckpt-job.service"
    shown.symlink_to(installed / "user" / f"{name}@.service")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert analyze("--user", "verify", "--man=no", shown, env=environment) == (0, "", "")


@needs_systemd
def test_systemd_analyze_finds_an_invalid_unit(tmp_path):
    (tmp_path / "wrong@.service").write_text("[Service]\nExecStart=/bin/true\nWatchDogSec=3\n")
    assert analyze("verify", "--man=no", tmp_path / "wrong@.service") != (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", ["syncd", "syncd-follow", "syncd-mirror"])
def test_the_exposure_of_the_units_is_within_the_documented_limit(installed, name, record_line):
    code, output, errors = analyze(
        "security", "--offline=true", "--json=short", installed / "system" / f"{name}@.service"
    )
    assert code == 0, errors
    assert json.loads(output)
    _, text, _ = analyze("security", "--offline=true", installed / "system" / f"{name}@.service")
    found = re.search(r"Overall exposure level for .*: ([\d.]+)", text)
    assert found, text
    record_line(f"systemd-analyze security {name}@.service: {found[1]}")
    assert float(found[1]) <= MOST_EXPOSED


def test_no_unit_setting_pins_the_mount_of_the_job():
    """Each of these makes a mount of its own at or above the job, which a remount by hand does not reach."""
    pins = re.compile(
        r"^(ReadWritePaths|ReadOnlyPaths|BindPaths|BindReadOnlyPaths|ProtectHome|ProtectSystem=strict|PrivateMounts|Root\w+)",
        re.MULTILINE,
    )
    assert not [path.name for path in UNITS.glob("*.service") if pins.search(path.read_text())]


def test_every_unit_is_not_restarted_after_usage_and_configuration_errors():
    units = list(UNITS.glob("*.service"))
    assert len(units) == 5
    for unit in units:
        text = unit.read_text()
        assert "\nRestart=on-failure\nRestartSec=5\n" in text, unit
        assert "\nRestartPreventExitStatus=2 78\n" in text, unit
        assert "\nStartLimitIntervalSec=0\n" in text, unit


@pytest.mark.parametrize("name", ["syncd@.service", "syncd-user@.service"])
def test_the_watchdog_interval_is_longer_than_two_takeover_time_outs(name):
    found = re.search(r"^WatchdogSec=(\d+)$", (UNITS / name).read_text(), re.MULTILINE)
    assert found
    # A stand-by takes over long before systemd ends the one that hangs.
    assert int(found[1]) > 2 * DaemonConfig().takeover


def test_the_units_start_this_installation(installed):
    unit = (installed / "system/syncd@.service").read_text()
    assert f"\nExecStart={sys.executable} -P -m syncd watch $SYNCD_OPTIONS -- %f\n" in unit
    assert "/usr/bin/syncd" not in unit
    follower = (installed / "system/syncd-follow-e1@.service").read_text()
    assert f"\nExecStart={sys.executable} -P -m syncd follow %f $SYNCD_FOLLOW_OPTIONS\n" in follower


def test_install_units_prints_the_next_commands(shell, tmp_path):
    done = shell("install-units", "--dir", tmp_path)
    assert done.out.endswith(
        "next:\n  systemd-sysusers\n  systemd-tmpfiles --create\n  systemctl daemon-reload\n"
        '  systemctl enable --now "syncd@$(systemd-escape -p /ckpt/job).service"\n'
    )


def test_install_units_twice_changes_nothing(shell, tmp_path):
    shell("install-units", "--dir", tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    done = shell("install-units", "--dir", tmp_path)
    assert done.code == 0
    assert done.out.count(": unchanged\n") == 6
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_units_of_an_earlier_install_are_replaced(shell, tmp_path):
    shell("install-units", "--dir", tmp_path, "--run-as", "alice")
    done = shell("install-units", "--dir", tmp_path, "--run-as", "bob:cluster")
    assert done.code == 0
    assert f"{tmp_path}/systemd/system/syncd@.service: updated" in done.out
    unit = (tmp_path / "systemd/system/syncd@.service").read_text()
    assert "\nUser=bob\nGroup=cluster\n" in unit
    assert not (tmp_path / "sysusers.d").exists(), "an own user is not made"
    assert "d /dev/shm/syncd  0755 bob cluster -" in (tmp_path / "tmpfiles.d/syncd.conf").read_text()


def test_units_changed_by_hand_are_kept_without_force(shell, tmp_path):
    shell("install-units", "--dir", tmp_path)
    unit, other = (
        tmp_path / "systemd/system/syncd@.service",
        tmp_path / "systemd/system/syncd-follow@.service",
    )
    unit.write_text(changed := unit.read_text().replace("WatchdogSec=60", "WatchdogSec=600"))
    other.unlink()
    done = shell("install-units", "--dir", tmp_path)
    assert done.code == 2
    assert str(unit) in done.err
    assert "--force" in done.err
    assert (unit.read_text(), other.exists()) == (changed, False), "all or nothing"
    assert shell("install-units", "--dir", tmp_path, "--force").code == 0
    assert "WatchdogSec=60\n" in unit.read_text()


def test_a_dry_run_writes_nothing(shell, tmp_path):
    done = shell("install-units", "--dir", tmp_path / "etc", "--dry-run")
    assert done.code == 0
    assert done.out.count(": new (not written)\n") == 6
    assert not (tmp_path / "etc").exists()


def test_user_units_are_installed_below_xdg_config_home(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert shell("install-units", "--user").code == 0
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    units = {f"systemd/user/syncd-{name}@.service" for name in ("user", "follow-user")}
    assert found == units | {"syncd/syncd.env.example"}


@pytest.mark.parametrize(
    "options",
    [["--user", "--run-as", "alice"], ["--run-as", "a b"], ["--run-as", "alice:"], ["--engine", "../x"]],
)
def test_invalid_install_options_are_refused(shell, tmp_path, options):
    done = shell("install-units", "--dir", tmp_path / "etc", *options)
    assert done.code == 2, done.out
    assert done.err.startswith("error: ")
    assert not (tmp_path / "etc").exists()


def test_an_unwritable_unit_directory_exits_with_74(shell, tmp_path):
    (tmp_path / "systemd").write_text("a file where a directory must be")
    done = shell("install-units", "--dir", tmp_path)
    assert done.code == 74
    assert str(tmp_path) in done.err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/opt/a/bin/python", "/opt/a/bin/python"),
        ("/opt/a b/python", '"/opt/a b/python"'),
        ("/opt/50%/$x", "/opt/50%%/$$x"),
        ('/opt/"q"\\', '"/opt/\\"q\\"\\\\"'),
    ],
)
def test_command_words_are_quoted_for_systemd(word, expected):
    assert quoted(word) == expected


def test_the_shipped_unit_is_the_rendered_unit_for_packagers():
    text = (UNITS / "syncd@.service").read_text()
    assert rendered(text, UnitRequest(user=False, command=("/usr/bin/syncd",))) == text


def test_a_python_below_a_private_directory_is_found(tmp_path):
    tmp_path.chmod(0o700)
    found = closed_directory(f"{tmp_path}/bin/python")
    assert found is not None
    assert str(tmp_path).startswith(found)
    assert closed_directory("/usr/bin/env") is None
