"""Into a job: bit-equal files, resumed copies, rewinds and rollbacks, a lead that is held, refusals."""

import contextlib
import errno
import os
import shutil
import threading
from functools import partial

import pytest
from support.fake_hook import FakeEngine, FakeHook, digest_of
from support.followers import QUICK
from support.jobs import steps_of
from support.mirrors import KilledError, MemoryObjects, Pull, Push, files_of, no_meter
from support.waiting import until

from explorer_hooks.follower.follower import Follower, FollowOptions
from syncd.daemon.service import Daemon
from syncd.errors import ConfigError, CorruptDataError, TryAgainError
from syncd.parts.mirror.meter import Meter, StoppedError
from syncd.parts.mirror.places import check_target
from syncd.parts.mirror.run import detach
from syncd.parts.mirror.worker import Work, Worker
from syncd.protocol.job_end import JobEnd, clear_finished, mark_finished, read_end
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk, SystemClock, write_all_at
from syncd.protocol.manifest import read_manifest
from syncd.protocol.mirror_report import mirror_of_presence
from syncd.protocol.owner import MirrorSource, mirrored_from, refuse_mirrored
from syncd.protocol.presence import read_presences
from syncd.protocol.probe import Probe, read_base_probe, write_base_probe
from syncd.protocol.request import Request, read_requests, write_request
from syncd.protocol.version import engine_label, read_marker, read_version
from syncd.synchronizer import Synchronizer
from syncd.transports.delta.materialise import prove

PROBE = Probe(((1, 2, 3),), ((-0.5, -0.25),), "float32", "float32")


@pytest.fixture
def pulls():
    made = []
    yield lambda *arguments, **more: made.append(Pull(*arguments, **more)) or made[-1]
    for one in made:
        one.close()


def assert_same(trainer, far):
    """The far job has the source's version under its label, and every byte of its chain."""
    near_version, far_version = read_version(trainer.job), read_version(far)
    labels = [engine_label(one.pair, one.digest) for one in (near_version, far_version)]
    assert labels[0] == labels[1]
    assert (near_version.path, near_version.kind) == (far_version.path, far_version.kind)
    step = near_version.step
    while step is not None:
        assert files_of(trainer.job, step) == files_of(far, step)
        step = read_manifest(far.disk, far.step(step)).parent
    assert read_marker(far.disk, far.marker).step == near_version.step


def pulled(trainer, far, pulls, count):
    """Return a mirror of a job with so many whole steps, which has them all."""
    for step in range(1, count + 1):
        trainer.keyframe(step)
    pull = pulls(trainer.job, far)
    pull.run()
    return pull


def test_deltas_arrive_bit_equal_over_an_object_store(trainer, far, pulls):
    trainer.model(1)
    trainer.delta(2, 1)
    objects = MemoryObjects()
    push, pull = Push(trainer.job, objects), pulls(objects, far)
    for step in (3, 4, 5):
        push.run()
        pull.run()
        assert_same(trainer, far)
        assert prove(far, trainer.pair[1]) == []
        trainer.delta(step, step - 1)
    assert pull.recorder.of("version_published")[-1]["step"] == 4


def test_a_job_is_mirrored_into_another_file_system_without_a_store(trainer, far, pulls):
    trainer.model(1)
    trainer.delta(2, 1)
    pull = pulls(trainer.job, far)
    pull.run()
    assert_same(trainer, far)
    assert mirrored_from(far).source == trainer.job.root
    before = far.disk.stat(f"{far.step(2)}/manifest.json")
    pull.run()
    assert far.disk.stat(f"{far.step(2)}/manifest.json") == before


def test_the_lag_is_told_when_it_begins_and_when_it_ends(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 1)
    told = [(event["behind"], event["bytes"]) for event in pull.recorder.of("mirror_lag_changed")]
    assert [behind for behind, _ in told] == [1, 0]
    assert told[-1] == (0, 0)


def test_a_mirror_that_stands_by_tells_no_lag(trainer, far, pulls, monkeypatch):
    pull = pulled(trainer, far, pulls, 1)
    trainer.keyframe(2)
    monkeypatch.setattr(pull.source, "read", lambda *_: b"")
    with pytest.raises(CorruptDataError):
        pull.mirror.turn()
    assert pull.recorder.of("mirror_lag_changed")[-1]["behind"] == 1
    pull.daemon.leader.release()
    assert not pull.mirror.turn()
    assert pull.recorder.of("mirror_lag_changed")[-1]["behind"] == 0


@pytest.mark.slow
def test_followers_at_the_far_end_read_from_each_other_and_have_the_sources_labels(
    trainer, far, place, pulls
):
    pytest.importorskip("syncd.parts.hosts")
    trainer.model(1)
    pull, engines = pulls(trainer.job, far), [FakeEngine(), FakeEngine()]
    pull.run()
    with contextlib.ExitStack() as opened:
        followers = [
            opened.enter_context(
                Follower.open(far.root, FakeHook(engine), f"e{number}", options_of(f"{place}/stage{number}"))
            )
            for number, engine in enumerate(engines)
        ]
        for step in (1, 2):
            for follower in followers:
                assert follower.turn(20.0).kind == "applied"
                until(lambda: pull.tick() or os.path.exists(f"{far.state}/peers.json"))
            near = read_version(trainer.job)
            assert {engine.label for engine in engines} == {engine_label(near.pair, near.digest)}
            assert {engine.weights for engine in engines} == {digest_of(f"{place}/job-exports/{step}-{step}")}
            if step == 1:
                trainer.delta(2, 1)
                pull.run()
        presences = read_presences(far.disk, far.explorers)[0].values()
        assert max(presence.info.get("read", {}).get("peers", 0) for presence in presences) > 0


def options_of(stage):
    return FollowOptions(stage=stage, peers="127.0.0.1:0", **QUICK)


class KillingDisk(LocalDisk):
    """A disk of which the rename of a number ends the process, before it or after it."""

    count, after = 0, False
    lock = threading.Lock()  # several files are copied at once

    def rename(self, source, target):
        if "global_step" not in target:
            super().rename(source, target)
            return
        with self.lock:
            type(self).count -= 1
            is_last = self.count == 0
        if is_last and not self.after:
            raise KilledError
        super().rename(source, target)
        if is_last:
            raise KilledError


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_each_rename_costs_nothing_that_was_copied(trainer, place, pulls, after):
    trainer.model(1)
    trainer.delta(2, 1)
    size = sum(read_manifest(trainer.job.disk, trainer.job.step(step)).size for step in (1, 2))
    count = 0
    while True:
        count += 1
        root = f"{place}/far{count}"
        os.mkdir(root)
        KillingDisk.count, KillingDisk.after = count, after
        killed = Pull(trainer.job, Job.at(root, disk=KillingDisk((root,))))
        try:
            killed.run()
        except KilledError:
            pass
        else:
            killed.close()
            break
        killed.daemon.leader.release()  # as of a process that is seen to have ended
        moved = killed.target._meter.moved
        killed.source.close()
        KillingDisk.count = -1
        meter = no_meter()
        pull = pulls(trainer.job, Job.at(root), meter=meter)
        pull.run()
        assert_same(trainer, Job.at(root))
        assert moved + meter.moved == size, count
    assert count >= 8


def test_a_file_goes_on_where_its_copy_was_left(trainer, far, pulls, monkeypatch):
    trainer.model(1)
    monkeypatch.setattr("syncd.parts.mirror.job_source.JobSource.piece", 10_000)
    stop = threading.Event()

    class Stopping(Meter):
        def spend(self, size):
            super().spend(size)
            if self.moved > 60_000:
                stop.set()

    first = Stopping(SystemClock(), 0, stop)
    killed = Pull(trainer.job, far, meter=first)
    with pytest.raises(StoppedError):
        killed.run()
    killed.close()
    second = no_meter()
    pulls(trainer.job, far, meter=second).run()
    assert_same(trainer, far)
    size = read_manifest(trainer.job.disk, trainer.job.step(1)).size
    # Four files are copied at once, and each may have lost the piece that was under way.
    assert size <= first.moved + second.moved <= size + 4 * 10_000


def test_a_full_disk_is_said_and_the_copy_goes_on_where_it_was_once_there_is_room(
    trainer, far, pulls, monkeypatch
):
    trainer.model(1)
    monkeypatch.setattr("syncd.parts.mirror.job_source.JobSource.piece", 50_000)
    written, told, meter = [], [], no_meter()

    def write(descriptor, data, offset):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        write_all_at(descriptor, data, offset)

    monkeypatch.setattr("syncd.parts.mirror.job_target.write_all_at", write)
    pull = pulls(trainer.job, far, meter=meter)
    pull.tick()
    work = Work("versions", pull.mirror.turn, 0.25, roots=(far.root,))
    worker = Worker(work, lambda name, level, **fields: told.append((name, fields)), threading.Event())
    assert [worker.step(), worker.step()] == [0.5, 1.0]
    ((name, fields),) = told
    assert name == "mirror_failed"
    assert "full" in fields["detail"]
    assert "df -h" in fields["hint"]
    monkeypatch.setattr("syncd.parts.mirror.job_target.write_all_at", write_all_at)
    pull.run()
    assert_same(trainer, far)
    # What a thread could not write it had read: at most four pieces, twice.
    assert meter.moved <= read_manifest(trainer.job.disk, trainer.job.step(1)).size + 2 * 4 * 50_000


def test_a_copy_that_was_damaged_meanwhile_begins_anew(trainer, far, pulls, monkeypatch):
    trainer.model(1)
    manifest = read_manifest(trainer.job.disk, trainer.job.step(1))
    attempt = far.attempt(1, manifest.attempt)
    os.makedirs(f"{attempt}/actor")
    name = manifest.shards[0].name.removeprefix("actor/")
    with open(f"{attempt}/actor/.{name}.mirror", "wb") as file:
        file.write(b"x" * 1000)
    pull = pulls(trainer.job, far)
    with pytest.raises(Exception, match="does not match its digest"):
        pull.run()
    pull.run()
    assert_same(trainer, far)


def test_a_rollback_and_what_follows_have_the_sources_pairs(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 3)
    write_request(trainer.job, Request("rollback", 2, asked_at=1.0, reason="worse"))
    trainer.tick()
    pull.run()
    assert pull.pair == trainer.pair == (2, 2)
    assert_same(trainer, far)
    trainer.keyframe(4)
    pull.run()
    assert pull.pair == trainer.pair == (2, 4)
    assert_same(trainer, far)


def test_steps_that_were_written_again_replace_the_old_ones(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 3)
    trainer.rewind(1)
    pull.run()
    assert pull.pair == (2, 1)
    trainer.keyframe(2, salt=77)
    pull.run()
    trainer.keyframe(3, salt=78)
    pull.run()
    assert pull.pair == trainer.pair == (2, 3)
    assert_same(trainer, far)


def test_a_mirror_that_was_away_during_a_rewind_goes_back_to_the_version_before(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 3)
    trainer.rewind(1)
    trainer.keyframe(2, salt=77)
    trainer.keyframe(3, salt=78)
    pull.run()
    assert [(one["generation"], one["step"]) for one in pull.recorder.of("version_published")] == [
        (1, 3), (2, 2), (2, 3),
    ]  # fmt: skip
    assert_same(trainer, far)


def test_without_a_common_step_it_says_that_a_new_directory_is_needed(trainer, far, pulls):
    trainer.keyframe(0)
    trainer.keyframe(1)
    pull = pulls(trainer.job, far, keep_last=1)
    pull.run()
    assert steps_of(far) == [1]
    trainer.rewind(0)
    trainer.keyframe(1, salt=50)
    shutil.rmtree(trainer.job.step(0))
    with pytest.raises(TryAgainError, match="no older step is the same"):
        pull.run()


@pytest.fixture
def always(monkeypatch):
    """Each iteration looks at the end of the source's job."""
    monkeypatch.setattr("syncd.parts.mirror.mirror.END_EVERY", 0.0)


@pytest.mark.parametrize("over", ["store", "directories"])
def test_the_baseline_that_engines_are_calibrated_by_comes_with_the_next_version(trainer, far, pulls, over):
    objects = MemoryObjects()
    push, pull = Push(trainer.job, objects), pulls(objects if over == "store" else trainer.job, far)
    for step, baseline in ((1, None), (2, PROBE), (3, PROBE)):
        trainer.keyframe(step)
        if step == 2:
            write_base_probe(trainer.job, PROBE, "models/base")
        if over == "store":
            push.run()
        pull.run()
        assert read_base_probe(far) == baseline
    assert far.disk.read(far.base_probe) == trainer.job.disk.read(trainer.job.base_probe)


def test_a_job_that_is_detached_records_a_baseline_of_its_own(trainer, far, pulls):
    write_base_probe(trainer.job, PROBE, "models/base")
    pulled(trainer, far, pulls, 1).daemon.leader.release()
    assert read_base_probe(far) == PROBE
    detach(far.root)
    own = Probe(((7, 8),), ((-2.0,),), "float32", "float32")
    write_base_probe(far, own, "models/other")
    assert read_base_probe(far) == own


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("over", ["store", "directories"])
def test_the_far_job_ends_with_the_job_and_goes_on_with_it(trainer, far, pulls, over):
    objects = MemoryObjects()
    push = Push(trainer.job, objects)

    def mirror():
        if over == "store":
            push.run()
        pull.run()

    pull = pulls(objects if over == "store" else trainer.job, far)
    trainer.keyframe(1)
    mirror()
    assert read_end(far) is None
    mark_finished(trainer.job, JobEnd(2, "total_steps 2 reached"))
    mirror()
    assert read_end(far) is None  # the last version is still to come
    trainer.keyframe(2)
    mirror()
    mirror()
    assert read_end(far) == JobEnd(2, "total_steps 2 reached")
    clear_finished(trainer.job)
    mirror()
    assert read_end(far) is None
    mark_finished(trainer.job, JobEnd(2, "it was stopped"))
    mirror()
    trainer.keyframe(3)
    clear_finished(trainer.job)
    mirror()
    mirror()
    assert (pull.pair, read_end(far)) == ((1, 3), None)


@pytest.mark.usefixtures("always")
def test_an_end_whose_last_version_never_comes_is_passed_on_after_a_while(trainer, far, pulls, monkeypatch):
    monkeypatch.setattr("syncd.protocol.job_end.LAST", 0.0)
    pull = pulled(trainer, far, pulls, 1)
    mark_finished(trainer.job, JobEnd(2, "total_steps 2 reached"))
    pull.run()
    assert read_end(far) == JobEnd(2, "total_steps 2 reached")


def test_a_second_mirror_stands_by_and_takes_over(trainer, far, pulls):
    trainer.keyframe(1)
    first, second = pulls(trainer.job, far), pulls(trainer.job, far)
    first.run()
    second.tick()
    assert not second.target.is_ready()
    assert second.mirror.turn() is False
    first.daemon.close()
    trainer.keyframe(2)
    second.run()
    assert second.pair == (1, 2)
    assert_same(trainer, far)


def test_a_paused_leader_neither_seals_nor_publishes(trainer, far, pulls):
    first = pulled(trainer, far, pulls, 1)
    term = first.daemon.leader.term
    term.release()
    second = pulls(trainer.job, far)
    second.run()
    trainer.keyframe(2)
    with pytest.raises(TryAgainError, match="taken over"):
        first.mirror.turn()
    assert steps_of(far) == [1]
    second.run()
    assert_same(trainer, far)


def test_retention_at_the_far_end_is_its_daemons(trainer, far, pulls):
    pull = pulls(trainer.job, far, keep_last=1)
    for step in range(1, 6):
        trainer.keyframe(step)
        pull.run()
    ends = SystemClock().monotonic() + 20
    while steps_of(far) != [4, 5]:  # the version before stays; a heartbeat ends the mirror's own lease
        assert SystemClock().monotonic() < ends
        pull.tick()
    assert len(steps_of(trainer.job)) > 1


def test_a_rollback_that_is_asked_for_at_the_far_end_is_refused(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 2)
    write_request(far, Request("rollback", 2, asked_at=1.0))
    pull.tick()
    assert not read_requests(far)
    assert "its source" in pull.recorder.of("request_refused")[0]["detail"]
    assert pull.pair == (1, 2)


def test_a_daemon_a_trainer_and_a_publish_are_refused(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 1)
    pull.daemon.leader.release()
    with pytest.raises(ConfigError, match="is a mirror of") as refused:
        refuse_mirrored(far, "a trainer")
    assert refused.value.exit_code == 78
    assert refused.value.hint.endswith(f"syncd mirror {far.root} --detach")
    with Synchronizer.open(far.root, "trainer") as writer:
        baseline = partial(write_base_probe, far, PROBE, "models/base")
        for work in (partial(writer.publish, {}, 3), writer.publish_received, baseline):
            with pytest.raises(ConfigError, match="is a mirror of"):
                work()
    own = Daemon(far, pull.daemon.config, SystemClock(), pull.recorder)
    own.tick()
    assert not own.leads
    assert isinstance(own.error, ConfigError)


def test_a_job_of_its_own_and_a_mirror_of_another_job_are_no_targets(trainer, far, place, pulls):
    source = MirrorSource("s3://bucket/job", "aa")
    trainer.keyframe(1)
    with pytest.raises(ConfigError, match="a job of its own"):
        check_target(trainer.job, source)
    pulls(trainer.job, far).run()
    with pytest.raises(ConfigError, match="a mirror of another job"):
        check_target(far, source)
    os.mkdir(f"{place}/empty")
    assert check_target(Job.at(f"{place}/empty"), source) == source
    assert check_target(far, MirrorSource(trainer.job.root, "")).source == trainer.job.root


def test_both_ends_show_how_far_the_mirror_is_and_forget_it_with_its_end(trainer, far, pulls):
    pull = pulled(trainer, far, pulls, 1)
    pull.mirror.show(state="failing", detail="no")
    for job in (trainer.job, far):
        deadline = SystemClock().monotonic() + 20
        report = None
        while report is None or report.state != "failing":
            assert SystemClock().monotonic() < deadline
            presences = read_presences(job.disk, job.explorers)[0].values()
            report = next(filter(None, map(mirror_of_presence, presences)), None)
        assert (report.generation, report.step, report.behind, report.detail) == (1, 1, 0, "no")
    pull.close()
    for job in (trainer.job, far):
        assert not read_presences(job.disk, job.explorers)[0]
