"""What is stored as changes of a step keeps it, whatever happens between the scan and the removal."""

import pytest
from support.deltas import SmallModel, contents, write_delta
from support.jobs import start, steps_of

from syncd.daemon import trash
from syncd.daemon.trash import Trash
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term
from syncd.protocol.request import Pin, write_pin
from syncd.protocol.version import write_marker
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.materialise import materialise


@pytest.fixture
def model():
    return SmallModel()


@pytest.fixture
def job(tmp_path, model):
    """Return a job whose steps 1 to 3 are a chain that nothing needs once step 4, a whole one, is published."""
    (tmp_path / "job").mkdir()
    job, disk = Job.at(tmp_path / "job"), FollowingDisk()
    publish_export(job, 1, disk, read_export(disk, model.export(tmp_path / "export1")))
    for step in (2, 3):
        write_delta(job, step, model.train().export(tmp_path / f"export{step}"), step - 1)
    publish_export(job, 4, disk, read_export(disk, model.train().export(tmp_path / "export4")))
    return job


def at_claims(monkeypatch, number, action):
    """Do something right before the daemon reads leases and pins for the given time, from 1."""
    calls = []

    def read(*arguments):
        calls.append(None)
        if len(calls) == number:
            action()
        return original(*arguments)

    original = trash.read_claims
    monkeypatch.setattr(trash, "read_claims", read)


def tick(daemon, clock, times=1, seconds=10):
    for _ in range(times):
        daemon.tick()
        clock.at += seconds


def test_a_chain_goes_from_its_newest_delta_to_its_keyframe(job, monkeypatch):
    moved = []

    def move(self, source, name):
        moved.append(int(source.rpartition("_")[2]))
        original(self, source, name)

    original = Term.move_to_trash
    monkeypatch.setattr(Term, "move_to_trash", move)
    daemon, _, clock = start(job, keep_last=1)
    tick(daemon, clock, 2)
    assert moved == [3, 2, 1]
    assert steps_of(job) == [4]


@pytest.mark.fault("a step is pruned while it is read")
@pytest.mark.parametrize("number", [1, 2])
def test_a_pin_before_or_after_the_renames_keeps_the_whole_chain(job, monkeypatch, tmp_path, number):
    at_claims(monkeypatch, number, lambda: write_pin(job, Pin(3, "best")))
    daemon, recorder, clock = start(job, keep_last=1)
    tick(daemon, clock)
    assert steps_of(job) == [1, 2, 3, 4]
    kept = {event["step"]: event["rule"] for event in recorder.of("step_kept") if event["step"] < 4}
    assert kept == {3: "leased", 2: "chain", 1: "chain"}
    tick(daemon, clock, 3)
    materialise(job, 3, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "export3")


def seal_late(job, model, tmp_path):
    """Seal step 6 as a delta of step 2."""
    return lambda: write_delta(job, 6, model.train().export(tmp_path / "export6"), 2)


def test_a_delta_that_was_sealed_since_the_scan_keeps_its_parents(job, monkeypatch, tmp_path, model):
    at_claims(monkeypatch, 1, seal_late(job, model, tmp_path))
    daemon, recorder, clock = start(job, keep_last=1)
    tick(daemon, clock)
    assert steps_of(job) == [1, 2, 4, 6]
    assert {event["step"]: event["rule"] for event in recorder.of("step_kept") if event["step"] < 3} == {
        1: "chain", 2: "chain"
    }  # fmt: skip
    tick(daemon, clock, 3)
    assert daemon.snapshot.version.step == 6
    assert steps_of(job)[:2] == [1, 2]
    materialise(job, 6, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "export6")


def test_what_a_dead_leader_took_from_under_a_new_delta_is_put_back(job, monkeypatch, tmp_path, model):
    at_claims(monkeypatch, 1, seal_late(job, model, tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(Trash, "_check_again", lambda *_: {})  # it dies before it looks again
        first, _, clock = start(job, keep_last=1)
        first.tick()
        assert steps_of(job) == [4, 6]
    first.leader.release()
    daemon, _, clock = start(job, keep_last=1, trash_grace=0)
    tick(daemon, clock, 4, 30)
    assert daemon.snapshot.version.step == 6
    assert steps_of(job)[:2] == [1, 2]
    materialise(job, 6, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "export6")


def test_what_a_delta_needs_that_is_sealed_after_the_removal_is_put_back(job, monkeypatch, tmp_path, model):
    """The trainer decided for the delta before its parent went, and sealed it after the daemon had looked."""
    write_delta(job, 6, model.train().export(tmp_path / "export6"), 2)
    (tmp_path / "job" / "global_step_6").rename(tmp_path / "later")
    write_marker(job.disk, job.marker, 4)
    daemon, recorder, clock = start(job, keep_last=1)
    tick(daemon, clock)
    assert steps_of(job) == [4]
    (tmp_path / "later").rename(tmp_path / "job" / "global_step_6")
    write_marker(job.disk, job.marker, 6)
    tick(daemon, clock)
    assert daemon.snapshot.version.step == 6
    assert "step_damaged" not in recorder.names()
    materialise(job, 6, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "export6")


@pytest.mark.parametrize("patience", [3600, 50])
def test_a_kept_step_that_cannot_be_read_keeps_the_steps_below_it_for_a_while(job, tmp_path, patience):
    """A mount in trouble looks like damage: it may be a delta of any of them."""
    write_pin(job, Pin(3, "best"))
    manifest = tmp_path / "job" / "global_step_3" / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-9])
    daemon, _, clock = start(job, keep_last=1, partial_grace=patience)
    tick(daemon, clock, 2)
    assert steps_of(job) == [1, 2, 3, 4]
    tick(daemon, clock, 10)
    assert steps_of(job) == ([1, 2, 3, 4] if patience == 3600 else [3, 4])
    manifest.write_bytes(content)
    tick(daemon, clock, 10)
    if patience == 3600:
        materialise(job, 3, str(tmp_path / "made"))
