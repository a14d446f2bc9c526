"""A document of the protocol that is no file, or may not be read: verbs go on, or say what, where and what helps."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import matrices
from support.cli import environment
from support.jobs import explorer, start, write_step
from support.users import DAEMON, as_user

from syncd.client.client import Client
from syncd.daemon.scan import Scanner
from syncd.errors import StorageError
from syncd.observe import event_names
from syncd.protocol.disk import temporary_name
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.request import Pin, Request, write_pin, write_request
from syncd.protocol.version import read_version

LEADER = ".syncd/daemon.lock/0000000001/leader.json"
DOCUMENTS = (
    "latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt", "finished.json", ".syncd/version.json",
    ".syncd/job.json", ".syncd/base_probe.json", LEADER, ".syncd/events.jsonl", ".syncd/explorers/e0.json",
    ".syncd/trainers/t.json", ".syncd/pins/global_step_1.json", ".syncd/requests/r.json",
    "global_step_2/manifest.json", "global_step_2/actor/.receipts/00001-of-00001.json", "global_step_3/manifest.json",
)  # fmt: skip


def directory(path):
    os.mkdir(path)
    with open(f"{path}/mine", "w") as file:
        file.write("precious")


def loop(path):
    os.symlink(os.path.basename(path), path)


@pytest.fixture
def job():
    """Return a job with two steps that were published, and a third one to publish, where everybody can reach it."""
    above = Path(tempfile.mkdtemp(prefix="syncd-document-"))
    above.chmod(0o755)
    (above / "job").mkdir()
    job = Job.at(above / "job")
    write_step(job, 1)
    write_step(job, 2)
    daemon, _, clock = start(job)
    daemon.tick()
    daemon.close()
    explorer(job, clock)
    write_pin(job, Pin(1, "kept"))
    write_step(job, 3)
    yield job
    shutil.rmtree(above)


def replace(job, name, put):
    path = f"{job.root}/{name}"
    if os.path.lexists(path):
        os.unlink(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    put(path)
    return path


EACH = list(itertools.product(DOCUMENTS, (directory, loop, os.mkfifo)))
SLOW = [(LEADER, loop), (LEADER, os.mkfifo)]
"""What waits for a leader that cannot be read, as another row does."""


@pytest.mark.parametrize(("name", "put"), matrices.rows(EACH, *(row for row in EACH if row not in SLOW)))
def test_the_next_version_is_published_and_verbs_answer(job, shell, name, put):
    path = replace(job, name, put)
    for verb in (["status"], ["ls"], ["wait", "--timeout", "0"], ["doctor", "--security"]):
        done = shell(verb[0], job.root, *verb[1:])
        assert done.code in (0, 4, 65, 77), done.err
        assert "bug" not in done.err
        assert "[Errno" not in done.err
    done = shell("watch", job.root, "--once", "--takeover", "4")
    expected = 2 if name == "global_step_3/manifest.json" else 3
    assert (done.code, read_version(job).step) == (0, expected), done.err
    if put is directory and name in (".syncd/version.json", ".syncd/job.json"):
        above = os.path.dirname(path)
        [aside] = [entry for entry in os.listdir(above) if entry.endswith(".aside")]
        assert os.listdir(f"{above}/{aside}") == ["mine"], "nothing of it is deleted"


@pytest.mark.parametrize("name", [".syncd/version.json", ".syncd/job.json", LEADER])
def test_a_daemon_that_runs_goes_on_where_a_directory_takes_the_place_of_its_documents(job, name):
    daemon, _, clock = start(job, takeover=3.0)
    for _ in range(9):
        daemon.tick()
        clock.at += 1.0
    assert daemon.leads
    replace(job, name.replace("0000000001", f"{daemon.leader.term.token:010d}"), directory)
    write_step(job, 4)
    for _ in range(3):
        clock.at += 3.0
        daemon.tick(woken=True)
    assert (daemon.error, read_version(job).step) == (None, 4)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_version_file_that_cannot_be_read_stops_decisions_and_nothing_else(job):
    for above, directories, files in os.walk(job.root):
        for name in ("", *directories, *files):
            os.lchown(os.path.join(above, name), DAEMON, DAEMON)
    write_request(job, Request("rollback", 1, identity="r", asked_at=0.0))
    os.chown(f"{job.requests}/r.json", DAEMON, DAEMON)
    os.chown(job.version, 0, 0)
    os.chmod(job.version, 0o600)
    daemon, heard, clock = start(job, keep_last=1, takeover=1.0)
    with as_user(DAEMON):
        for _ in range(5):
            daemon.tick()
            clock.at += 1.0
        assert (daemon.error, daemon.leads) == (None, True)
        [told] = heard.of(event_names.VERSION_FILE_REJECTED)
        assert job.version in told["detail"]
        assert "chmod" in told["detail"]
    assert read_version(job).step == 2
    assert os.listdir(job.requests) == ["r.json"], "what it cannot judge it does not refuse"
    os.chown(job.version, DAEMON, DAEMON)
    with as_user(DAEMON):
        daemon.tick()
    assert read_version(job).step == 1


def test_an_unread_version_file_ends_watch_once_with_74(job, shell, monkeypatch):
    real = LocalDisk.read

    def read(disk, path, *limit):
        if path == job.version:
            raise PermissionError(13, "Permission denied", path)
        return real(disk, path, *limit)

    monkeypatch.setattr(LocalDisk, "read", read)
    done = shell("watch", job.root, "--once")
    assert done.code == StorageError.exit_code
    assert job.version in done.err
    assert "no version can be read" in shell("status", job.root, "--check").out


def test_a_configuration_that_leads_nowhere_is_refused_not_replaced_by_defaults(job, shell):
    os.symlink("/nowhere/config.toml", f"{job.root}/config.toml")
    assert shell("watch", job.root, "--once").code == 78
    assert shell("ls", job.root).code == 78


def test_a_full_disk_is_critical_without_a_daemon(job, shell, monkeypatch):
    monkeypatch.setattr(LocalDisk, "free", lambda *_: 0)
    done = shell("status", job.root, "--check")
    assert done.code == 2
    assert "df -h" in done.out
    monkeypatch.undo()
    monkeypatch.setattr(LocalDisk, "inodes", lambda *_: 0)
    assert "df -i" in shell("status", job.root, "--check").out


@pytest.mark.parametrize("verb", ["pin", "rollback"])
def test_a_verb_on_a_full_disk_names_the_file_and_what_shows_it(job, shell, monkeypatch, verb):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    done = shell(verb, job.root, "1")
    assert done.code == 74
    assert f"No space left on device: {job.root}/" in done.err
    assert f"df -h {job.root}" in done.err


@pytest.mark.parametrize("name", ["x" * 240, "x" * 255, "漢" * 85])
def test_a_name_of_any_length_has_a_temporary_one(job, shell, tmp_path, name):
    assert len(temporary_name(name).encode()) <= 255
    target = tmp_path / name
    done = shell("materialise", job.root, 2, "--to", target)
    assert done.code == 0, done.err
    assert os.listdir(target) == ["model-00001-of-00001.safetensors"]
    shutil.rmtree(target)


@pytest.mark.parametrize(("words", "code"), [(["status"], 0), (["wait", "--print", "path"], 78), (["ls"], 0)])
def test_a_path_that_the_output_cannot_spell_is_no_bug(tmp_path, words, code):
    place = tmp_path / "漢字"
    place.mkdir()
    job = Job.at(place)
    write_step(job, 1)
    daemon, _, _ = start(job)
    daemon.tick()
    daemon.close()
    done = subprocess.run(
        [sys.executable, "-m", "syncd", words[0], str(place), *words[1:]],
        capture_output=True, encoding="latin-1", env=environment(PYTHONIOENCODING="latin-1"), check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("\\u6f22" in done.stdout + done.stderr) == (words != ["ls"])


def test_a_script_gets_a_path_that_is_not_utf_8_as_it_is(tmp_path):
    place = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(place)
    job = Job.at(os.fsdecode(place))
    write_step(job, 1)
    daemon, _, _ = start(job)
    daemon.tick()
    daemon.close()
    words = [sys.executable, "-m", "syncd", "wait", place, "--print", "path"]
    done = subprocess.run(words, capture_output=True, env=environment(PYTHONIOENCODING="utf-8"), check=True)
    assert done.stdout == place + b"/global_step_1/actor\n"


@pytest.mark.parametrize("program", ["syncd", "trainer", "explorer"])
def test_no_program_fails_at_a_name_that_its_output_cannot_spell(program):
    text = (
        "import click, sys; from syncd import console\n"
        "group = click.Group(); group.command('say')(lambda: click.echo('漢字'))\n"
        f"sys.exit(console.run(group, {program!r}, ['say']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True, encoding="latin-1", env=environment(PYTHONIOENCODING="latin-1"), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\\u6f22\\u5b57\n")


def test_a_trainer_that_waits_in_a_job_whose_path_is_no_utf_8_has_a_presence_that_can_be_read(tmp_path):
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(place)
    with Client.open(place, "trainer", heartbeat=False) as trainer:
        trainer.describe({"waiting": {"for": "experiences", "path": place, "since": 1.0}})
        assert Scanner(trainer.job, trainer.clock).reconcile().unreadable == ()
