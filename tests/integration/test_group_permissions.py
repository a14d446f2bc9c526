"""Trainer, daemon and explorer as three users: one group lets them work together, and nobody else in."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.cli import environment
from support.jobs import shard_bytes
from support.processes import PROGRAMS

DAEMON, TRAINER, EXPLORER, STRANGER, GROUP = 54001, 54002, 54003, 54004, 54242

CLOSED = (2, 74)
"""Exit codes where the job directory cannot be entered."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def as_user(user, *words, member=True):
    """Run a command line, or a program, as a user, who is a member of the group or not."""
    group = GROUP if member else "-"
    return subprocess.run(
        [sys.executable, f"{PROGRAMS}/as_user.py", *map(str, (user, group, *words))],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(HOME="/nonexistent"),
    )


@pytest.fixture
def place():
    """Return a job directory that everybody can reach and only its policy closes."""
    above = Path(tempfile.mkdtemp(prefix="syncd-users-"))
    above.chmod(0o755)
    (above / "export").mkdir()
    (above / "export/model.safetensors").write_bytes(shard_bytes({"weight": (4, 8)}))
    job = above / "job"
    job.mkdir()
    yield job
    shutil.rmtree(above)


def close(job, permissions, group=""):
    """Give a job to the trainer, with a policy."""
    (job / "config.toml").write_text(f'[job]\npermissions = "{permissions}"\ngroup = "{group}"\n')
    os.chown(job, TRAINER, GROUP if group else TRAINER)
    job.chmod(0o2770 if group else 0o700)
    os.chown(job / "config.toml", TRAINER, GROUP if group else TRAINER)
    (job / "config.toml").chmod(0o640)


def must(done):
    assert done.returncode == 0, done.stderr
    return done


def test_users_of_one_group_share_a_job_and_others_see_nothing(place):
    close(place, "group", str(GROUP))
    publish(place, 1, 2)
    must(as_user(DAEMON, "watch", place, "--once", "--keep-last", 1))
    must(as_user(EXPLORER, f"{PROGRAMS}/client.py", place))
    publish(place, 3)
    must(as_user(DAEMON, "prune", place, "--keep-last", 1))
    assert must(as_user(EXPLORER, "verify", place, "--deep")).stdout.startswith("step 3")
    assert not (place / "global_step_1").exists()
    assert as_user(STRANGER, "status", place, member=False).returncode in CLOSED
    assert {mode for _, mode in below(place)} <= {0o660, 0o2770, 0o640}
    assert {os.stat(path).st_gid for path, _ in below(place)} == {GROUP}
    found = as_user(DAEMON, "doctor", place, "--security")
    assert found.returncode == 0, found.stdout


def test_a_private_job_is_closed_to_other_users(place):
    close(place, "private")
    publish(place, 1, 2)
    must(as_user(TRAINER, "watch", place, "--once"))
    assert as_user(DAEMON, "status", place).returncode in CLOSED
    assert {mode for _, mode in below(place)} <= {0o600, 0o700, 0o640}


def test_a_user_outside_the_group_is_refused_and_writes_nothing(place):
    close(place, "group", str(GROUP))
    place.chmod(0o2777)
    (place / "config.toml").chmod(0o644)
    done = as_user(STRANGER, "watch", place, "--once", member=False)
    assert done.returncode == 78
    assert "this user is not in the group" in done.stderr
    assert os.listdir(place) == ["config.toml"]


def publish(job, *steps):
    """Have the trainer publish steps."""
    for step in steps:
        must(as_user(TRAINER, "publish", job, step, job.parent / "export"))


def below(place):
    """Return all that was made in a job, with its mode."""
    paths = [Path(parent, name) for parent, names, files in os.walk(place) for name in (*names, *files)]
    return [(path, stat.S_IMODE(path.lstat().st_mode)) for path in paths]
