"""`syncd mirror` as a real process: a service, `--once`, what it refuses, and kills; and a trainer at the far end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from beds import probe
from beds.silent import silent
from support.checker import marker
from support.cli import environment
from support.experiences import whole_group, write
from support.job_file import tiny_job, write_job
from support.mirrors import Pull, files_of
from support.waiting import LONG
from support.whole_jobs import alone

from syncd.protocol.layout import Job
from syncd.protocol.owner import mirrored_from
from syncd.protocol.version import read_version

pytestmark = pytest.mark.slow


def syncd(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "syncd", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )


@pytest.fixture
def trainer(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    return trainer


def wait_until(condition, seconds=60):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_service_follows_its_source_through_kills_and_ends_on_sigterm(place, trainer):
    near, far = f"{place}/job", Job.at(f"{place}/far")
    command = [sys.executable, "-m", "syncd", "mirror", near, far.root, "--poll", "0.05"]
    for step in (3, 4):
        service = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
        try:
            trainer.delta(step, step - 1)
            wait_until(lambda: (version := read_version(far)) is not None and version.pair == trainer.pair)
            assert files_of(trainer.job, step) == files_of(far, step)
        finally:
            service.send_signal(signal.SIGKILL if step == 3 else signal.SIGTERM)
            code = service.wait(60)
    assert code == 0
    shown = syncd("status", far.root).stdout
    assert f"mirror of  {near}" in shown
    assert f"syncd mirror {near} {far.root}" in shown
    for refused in (("watch", far.root, "--once"), ("publish", far.root, 9, f"{near}-exports/1-1")):
        result = syncd(*refused)
        assert result.returncode == 78
        assert f"syncd mirror {far.root} --detach" in result.stderr
    assert syncd("mirror", far.root, "--detach").returncode == 0
    assert mirrored_from(far) is None
    assert syncd("watch", far.root, "--once").returncode == 0
    assert syncd("mirror", near, far.root, "--once").returncode == 78


def content_of(root):
    """Return every file below a directory, with its bytes and when it was written."""
    paths = [os.path.join(below, name) for below, _, names in os.walk(root) for name in names]
    return {path: (Path(path).read_bytes(), os.stat(path).st_mtime_ns) for path in paths}


def trained(log, file):
    """Run a real trainer to its end; return its exit code and what it said."""
    process = alone(log, file)
    try:
        return process.wait(LONG), process.said()
    finally:
        process.end()


def test_a_trainer_changes_nothing_in_a_mirrored_job_and_trains_it_once_it_is_detached(place, trainer):
    far = Job.at(f"{place}/far")
    with closing(Pull(trainer.job, far)) as pull:
        pull.run()
    tables = {"data": {"groups": 1, "group_size": 2}, "trainer": {"nproc": 1, "total_steps": 1}}
    file, before = write_job(f"{place}/far.toml", tiny_job(far.root, **tables)), content_of(far.root)
    code, said = trained(f"{place}/refused.log", file)
    assert (code, f"syncd mirror {far.root} --detach" in said) == (78, True), said
    assert content_of(far.root) == before
    assert syncd("mirror", far.root, "--detach").returncode == 0
    write(far, "e0", whole_group("g0"))
    code, said = trained(f"{place}/trains.log", file)
    assert (code, marker(far.root)) == (0, 1), said


def mount_states(log):
    with open(log, encoding="utf-8") as file:
        events = [json.loads(line) for line in file if line.endswith("\n")]
    return [one for one in events if one["event"] == "mount_state_changed"]


def test_a_hung_mount_of_the_source_is_reported_waited_for_and_no_obstacle_to_sigterm(place, trainer):
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    near, far, log = f"{place}/job", Job.at(f"{place}/far"), f"{place}/log"
    command = [sys.executable, "-m", "syncd", "mirror", near, far.root, "--log-format", "json"]
    with open(log, "wb") as stderr:
        service = subprocess.Popen(command, env=environment(), stderr=stderr)
    try:
        wait_until(lambda: read_version(far) is not None)
        with silent(near):
            wait_until(lambda: mount_states(log))
            stuck = mount_states(log)[0]
            assert (stuck["state"], near in stuck["detail"]) == ("stuck", True)
            assert "dmesg" in stuck["hint"]
        trainer.delta(3, 2)
        wait_until(lambda: read_version(far).pair == trainer.pair)
        with silent(near):
            time.sleep(0.3)
            service.terminate()
            assert service.wait(30) == 74
    finally:
        service.kill()
        service.wait()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["JOB"], 2, "no TARGET"),
        (["s3://a/b", "s3://c/d"], 2, "must be a job directory"),
        (["JOB", "ftp://a/b"], 2, "ftp://"),
        (["JOB", "FAR", "--keep", "2"], 2, "--keep is for object stores"),
        (["JOB", "FAR", "--max-rate", "much"], 2, "20MiB"),
        (["JOB", "FAR", "--detach"], 2, "no other option"),
        (["FAR", "--detach"], 2, "no mirror"),
        (["JOB", "NOWHERE"], 74, "mkdir"),
        (["JOB", "JOB"], 78, "a job of its own"),
    ],
)
def test_what_it_refuses(place, trainer, arguments, code, said):
    places = {"JOB": f"{place}/job", "FAR": f"{place}/far", "NOWHERE": f"{place}/nowhere"}
    result = syncd("mirror", *[places.get(one, one) for one in arguments])
    assert (result.returncode, said in result.stderr) == (code, True), result.stderr
