"""One bad document harms itself only: of a later protocol, or with a number that nothing may be counted up from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import explorer, start, steps_of, write_step
from support.waiting import LONG, until

from syncd.errors import ProtocolTooNewError
from syncd.protocol.documents import MAX_INTEGER
from syncd.protocol.layout import Job
from syncd.protocol.leadership import read_leader
from syncd.protocol.receipt import read_receipts, receipts_directory
from syncd.protocol.rendezvous import read_acknowledgements
from syncd.protocol.version import BELIEVED_GENERATION, MAX_GENERATION, read_version
from syncd.protocol.writer import StepWriter

LATER = json.dumps({"protocol": 2, "identity": "x", "step": {"changed": "form"}})


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


def put(path: str, text: str = LATER) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_text(text)
    return path


def pair(job):
    version = read_version(job)
    return version.pair if version else None


def syncd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncd", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


PLACES = {
    "manifest": "global_step_1/manifest.json",
    "explorer": ".syncd/explorers/x.json",
    "trainer": ".syncd/trainers/x.json",
    "pin": ".syncd/pins/global_step_2.json",
    "request": ".syncd/requests/x.json",
}


@pytest.mark.parametrize("kind", PLACES)
def test_daemon_and_views_work_beside_a_document_of_a_later_protocol(job, kind):
    daemon, heard, clock = start(job, prune=False)
    for step in (1, 2):
        write_step(job, step)
    daemon.tick(woken=True)
    put(f"{job.root}/{PLACES[kind]}")
    write_step(job, 3)
    clock.at += 70
    daemon.tick(woken=True)
    assert daemon.error is None
    assert pair(job) == (1, 3)
    status, listing = syncd("status", job.root), syncd("ls", job.root)
    assert (status.returncode, listing.returncode) == (0, 0)
    assert "upgrade syncd" in " ".join(status.stdout.split())
    if kind in ("pin", "request"):
        assert f"{job.root}/{PLACES[kind]}" in heard.of("document_rejected")[0]["detail"]
        assert len(heard.of("document_rejected")) == 1


def test_a_step_sealed_by_a_later_protocol_is_neither_published_nor_removed(job):
    daemon, _, clock = start(job, keep_last=1, partial_grace=10.0)
    for step in range(1, 6):
        write_step(job, step)
    put(f"{job.step(1)}/manifest.json")
    daemon.tick(woken=True)
    for _ in range(4):
        clock.at += 70
        daemon.tick(woken=True)
    assert steps_of(job) == [1, 5], "it is whole for whoever can read it"
    os.truncate(f"{job.step(1)}/manifest.json", 5)
    for _ in range(4):
        clock.at += 70
        daemon.tick(woken=True)
    assert steps_of(job) == [5], "a torn one goes"


def test_a_receipt_of_a_later_protocol_does_not_count(job):
    writer = StepWriter(job, 1, 1, "attempt")
    writer.begin()
    shard = writer.write("actor/model-00001-of-00001.safetensors", b"x")
    writer.receipt(1, [shard])
    put(f"{receipts_directory(writer.path)}/00002-of-00002.json")
    assert [receipt.writer for receipt in read_receipts(job.disk, writer.path)] == [1]


def test_an_acknowledgement_of_a_later_protocol_does_not_count(job):
    put(f"{job.rendezvous}/group/1/members/x.json")
    assert read_acknowledgements(job, "group", 1) == {}


def test_a_version_file_of_a_later_protocol_is_refused_and_kept(job):
    write_step(job, 1)
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    put(job.version)
    write_step(job, 2)
    daemon.tick(woken=True)
    assert isinstance(daemon.error, ProtocolTooNewError)
    assert Path(job.version).read_text() == LATER
    for verb in (["status"], ["wait", "--timeout", "0"], ["rollback"], ["watch", "--once"]):
        daemon.close()
        ended = syncd(verb[0], job.root, *verb[1:], *(["1"] if verb == ["rollback"] else []))
        assert (ended.returncode, "upgrade" in ended.stderr) == (78, True), verb


def test_a_leader_of_a_later_protocol_is_not_replaced(job):
    daemon, _, clock = start(job)
    put(f"{job.lock}/0000000001/leader.json")
    for _ in range(40):
        clock.at += 1
        daemon.tick()
    assert not daemon.leads
    assert isinstance(daemon.error, ProtocolTooNewError)


@pytest.mark.parametrize("name", ["version.json", "daemon.lock/0000000009/leader.json"])
def test_a_daemon_that_runs_ends_with_78_at_what_a_later_protocol_wrote(job, name):
    """Retried, it would stand there for ever: a service manager restarts it, or its watchdog kills it."""
    write_step(job, 1)
    with subprocess.Popen(
        [sys.executable, "-m", "syncd", "watch", job.root], stderr=subprocess.PIPE
    ) as process:
        try:
            until(lambda: pair(job) == (1, 1))
            put(f"{job.state}/{name}")
            if name != "version.json":
                process.send_signal(signal.SIGSTOP)
                shutil.rmtree(f"{job.lock}/0000000001")
                process.send_signal(signal.SIGCONT)
            _, err = process.communicate(timeout=LONG)
        finally:
            process.kill()
    assert process.returncode == 78, err
    assert b"upgrade syncd" in err
    assert Path(f"{job.state}/{name}").read_text() == LATER
    if name == "version.json":
        assert read_leader(job, 1).released


@pytest.mark.parametrize("generation", [MAX_INTEGER, MAX_GENERATION, BELIEVED_GENERATION + 1])
def test_an_explorers_absurd_generation_is_not_believed(job, generation):
    daemon, heard, clock = start(job)
    explorer(job, clock, applied=(generation, 7))
    for step in (1, 2):
        write_step(job, step)
        daemon.tick(woken=True)
    assert pair(job) == (1, 2)
    assert daemon.error is None
    if generation <= MAX_GENERATION:
        assert "too high to be real" in heard.of("document_rejected")[0]["detail"]
    else:
        (unreadable,) = daemon.snapshot.unreadable
        assert "e0" in unreadable


def test_a_version_after_the_highest_believed_generation_is_readable(job):
    daemon, _, clock = start(job)
    explorer(job, clock, applied=(BELIEVED_GENERATION, 7))
    write_step(job, 8)
    daemon.tick(woken=True)
    assert pair(job) == (BELIEVED_GENERATION + 1, 8)


@pytest.mark.parametrize("name", ["generation", "previous"])
def test_a_version_or_term_with_an_absurd_generation_is_replaced(job, name):
    daemon, _, _ = start(job)
    write_step(job, 1)
    daemon.tick(woken=True)
    document = json.loads(Path(job.version).read_text())
    absurd = MAX_INTEGER if name == "generation" else {"generation": MAX_INTEGER, "step": 1}
    put(job.version, json.dumps({**document, name: absurd}))
    leader = next(Path(job.lock).glob("*/leader.json"))
    floor = {"generation": MAX_INTEGER, "step": 9}
    leader.write_text(json.dumps({**json.loads(leader.read_text()), "floor": floor}))
    again, _, clock = start(job, takeover=4.0)
    write_step(job, 2)
    for _ in range(10):
        clock.at += 1
        again.tick(woken=True)
    assert again.leads
    assert pair(job) == (1, 2)
