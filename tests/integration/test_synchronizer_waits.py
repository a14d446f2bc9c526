"""Statuses, waits and answers, the same for threads and for asyncio, with a real daemon that ticks when told."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from support.jobs import write_step
from support.synchronizers import A_WHILE, LONG, eventually, stays

from syncd.client.own_presence import OwnPresence
from syncd.errors import FencedError, JobMissingError, StorageError, SyncdError, TimedOutError, UsageError
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.presence import Presence, RunningStatus, write_presence
from syncd.protocol.process import Process
from syncd.protocol.request import Request, write_request
from syncd.protocol.version import read_marker

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED


def publish(world, step):
    write_step(world.job, step)
    world.tick()


def asks(world, identity="e0"):
    return lambda: world.explorer(identity).status is REQUIRE_SYNC


# --- waiting --------------------------------------------------------------------------------------------------


def test_a_wait_returns_each_new_version_once(world, explorer):
    publish(world, 3)
    assert explorer.wait_new_model_state_dict(-1) == 3
    with pytest.raises(TimedOutError):
        explorer.wait_new_model_state_dict(3, timeout=0.05)
    publish(world, 5)
    assert explorer.wait_new_model_state_dict(3) == 5


def test_no_wait_returns_at_once_without_asking(world, explorer):
    assert explorer.wait_new_model_state_dict(-1, no_wait=True) == -1
    publish(world, 3)
    assert explorer.wait_new_model_state_dict(-1, no_wait=True) == 3
    assert world.explorer("e0").asked == 0


def test_a_wait_asks_for_a_sync_while_it_lasts(world, trainer, explorer):
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    assert trainer.explorer_requires_sync()
    assert trainer.get_explorer_status_counts() == {RUNNING: 0, REQUIRE_SYNC: 1, STOPPED: 0}
    publish(world, 1)
    assert call.result(LONG) == 1
    assert not trainer.explorer_requires_sync()


@pytest.mark.fault("a wait that timed out leaves its status wrong")
def test_a_wait_that_timed_out_restores_its_status(world, explorer):
    with pytest.raises(TimedOutError) as caught:
        explorer.wait_new_model_state_dict(0, timeout=0.05)
    assert caught.value.hint == f"syncd watch {world.job.root}"
    assert world.explorer("e0").status is RUNNING
    assert world.explorer("e0").asked == 1


@pytest.mark.fault("a wait that timed out leaves its status wrong")
def test_a_wait_that_is_interrupted_or_cancelled_restores_its_status(world, explorer):
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    assert isinstance(explorer.give_up(call), KeyboardInterrupt | asyncio.CancelledError)
    assert world.explorer("e0").status is RUNNING


@pytest.mark.fault("a wait that timed out leaves its status wrong")
def test_of_two_concurrent_waits_the_last_one_restores_the_status(world, explorer):
    first = explorer.later("wait_new_model_state_dict", 0, timeout=LONG)
    eventually(asks(world))
    with pytest.raises(TimedOutError):
        explorer.wait_new_model_state_dict(0, timeout=0.05)
    assert world.explorer("e0").status is REQUIRE_SYNC
    publish(world, 2)
    assert first.result(LONG) == 2
    assert world.explorer("e0").status is RUNNING


@pytest.mark.fault("one explorer's stop wakes another with nothing new")
def test_the_stop_of_another_explorer_ends_no_wait(world, trainer, explorer):
    other = world.open("explorer", "e1")
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    other.close()
    assert world.explorer("e1").status is STOPPED
    assert stays(call)
    publish(world, 4)
    assert call.result(LONG) == 4


def test_an_answer_ends_the_wait_of_its_asker(world, trainer, explorer):
    publish(world, 2)
    call = explorer.later("wait_new_model_state_dict", 2)
    eventually(asks(world))
    trainer.notify_no_new_model_state_dict()
    assert call.result(LONG) == 2


def test_an_answered_ask_is_not_answered_again(world, trainer):
    world.tick()
    asking = Presence("e0", REQUIRE_SYNC, incarnation="x", asked=1)
    write_presence(world.job.disk, world.job.explorers, asking)
    assert trainer.explorer_requires_sync()
    trainer.notify_no_new_model_state_dict()
    assert not trainer.explorer_requires_sync()
    beat = world.trainer().beat
    trainer.notify_no_new_model_state_dict()
    assert world.trainer().beat == beat  # nothing new to say, nothing written
    write_presence(world.job.disk, world.job.explorers, replace(asking, asked=2, beat=1))
    assert trainer.explorer_requires_sync()


@pytest.mark.fault('a "no new version" answer overtakes a publish')
def test_an_answer_does_not_overtake_an_earlier_publish(world, trainer, explorer):
    publish(world, 2)
    call = explorer.later("wait_new_model_state_dict", 2)
    eventually(asks(world))
    write_step(world.job, 4)  # announced, and the daemon has not looked yet
    trainer.notify_no_new_model_state_dict()
    assert world.trainer().answered == {"e0": 1}
    assert stays(call)
    world.tick()
    assert call.result(LONG) == 4


@pytest.mark.fault('a "no new version" answer overtakes a publish')
def test_a_trainers_stop_does_not_overtake_an_earlier_publish(world, trainer, explorer):
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    write_step(world.job, 6)
    trainer.close()
    assert (world.trainer().status, world.trainer().step) == (STOPPED, 6)
    assert stays(call)
    world.tick()
    assert call.result(LONG) == 6


@pytest.mark.fault('a "no new version" answer overtakes a publish')
def test_an_answer_during_a_rewind_waits_for_the_rewind(world, trainer, explorer):
    publish(world, 2)
    publish(world, 8)
    assert explorer.wait_new_model_state_dict(2) == 8
    call = explorer.later("wait_new_model_state_dict", 8)
    eventually(asks(world))
    trainer.set_model_state_dict(None, 2, rewind=True)
    trainer.notify_no_new_model_state_dict()
    assert stays(call)
    world.tick()
    assert call.result(LONG) == 2


@pytest.mark.fault('a "no new version" answer overtakes a publish')
def test_an_answer_waits_for_the_new_content_of_a_rewritten_step(world, trainer, explorer):
    publish(world, 8)
    assert explorer.wait_new_model_state_dict(-1) == 8
    call = explorer.later("wait_new_model_state_dict", 8)
    eventually(asks(world))
    world.job.disk.rename(world.job.step(8), f"{world.root}/aside")
    write_step(world.job, 8, announce=False, salt=99)
    trainer.set_model_state_dict(None, 8)
    trainer.notify_no_new_model_state_dict()
    assert stays(call)
    world.daemon._reconciled = float("-inf")  # the minute is over
    world.tick()
    assert world.pair() == (2, 8)
    assert call.result(LONG) == 8
    assert explorer.latest_version().digest == world.trainer().info["announced"]


def test_an_old_answer_does_not_end_a_new_wait(world, trainer, explorer):
    publish(world, 2)
    call = explorer.later("wait_new_model_state_dict", 2)
    eventually(asks(world))
    trainer.notify_no_new_model_state_dict()
    assert call.result(LONG) == 2
    assert stays(explorer.later("wait_new_model_state_dict", 2, timeout=5 * A_WHILE))


def test_the_ask_counter_continues_after_an_explorers_restart(world, trainer, explorer):
    publish(world, 2)
    for _ in range(3):
        call = explorer.later("wait_new_model_state_dict", 2)
        eventually(asks(world))
        trainer.notify_no_new_model_state_dict()
        assert call.result(LONG) == 2
    explorer.close()
    world.job.disk.unlink(f"{world.job.explorers}/e0.json")
    again = world.open("explorer", "e0")
    assert stays(again.later("wait_new_model_state_dict", 2, timeout=5 * A_WHILE))
    assert world.explorer("e0").asked == 4


def test_answers_are_accepted_after_a_manual_rollback(world, trainer, explorer):
    for step in (2, 4):
        publish(world, step)
    write_request(world.job, Request("rollback", 2))
    world.tick()
    assert world.pair() == (2, 2)
    assert explorer.wait_new_model_state_dict(4) == 2
    call = explorer.later("wait_new_model_state_dict", 2)
    eventually(asks(world))
    trainer.notify_no_new_model_state_dict()
    assert call.result(LONG) == 2


@pytest.mark.fault("a restart below an explorer's version asserts")
def test_a_rewind_of_the_trainer_is_a_new_version(world, trainer, explorer):
    for step in (4, 8):
        publish(world, step)
    assert explorer.wait_new_model_state_dict(-1) == 8
    trainer.set_model_state_dict(None, 4, rewind=True)
    world.tick()
    assert explorer.wait_new_model_state_dict(8) == 4
    with pytest.raises(TimedOutError):
        explorer.wait_new_model_state_dict(4, timeout=0.05)


@pytest.mark.fault("a restart below an explorer's version asserts")
def test_a_step_published_again_under_its_number_is_new(world, trainer, explorer):
    for step in (4, 8):
        publish(world, step)
    assert explorer.wait_new_model_state_dict(-1) == 8
    trainer.set_model_state_dict(None, 4, rewind=True)
    world.tick()
    world.run()
    trainer.vacate(8)
    write_step(world.job, 8, salt=99)
    eventually(lambda: world.pair() == (2, 8))
    assert explorer.wait_new_model_state_dict(8) == 8
    assert explorer.latest_version().pair == (2, 8)


@pytest.mark.fault("an explorer that waits before the trainer has started returns at once")
def test_an_explorer_may_wait_before_there_is_a_trainer(world, explorer):
    call = explorer.later("wait_new_model_state_dict", 0)
    assert stays(call)
    world.open("trainer")
    assert stays(call)
    publish(world, 1)
    assert call.result(LONG) == 1


@pytest.mark.fault("an explorer that waits before the trainer has started returns at once")
def test_a_wait_ignores_a_trainer_that_stopped_earlier(world):
    world.open("trainer").close()
    explorer = world.open("explorer", "e0")
    assert explorer.trainer_requires_weight_sync() is False
    call = explorer.later("wait_new_model_state_dict", 0)
    assert stays(call)
    world.open("trainer").close()
    assert call.result(LONG) == 0
    assert explorer.trainer_requires_weight_sync() is None


def test_the_stop_of_the_trainer_ends_a_wait(world, trainer, explorer):
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    trainer.set_trainer_status(STOPPED)
    assert call.result(LONG) == 0


@pytest.mark.fault("a dead trainer looks alive for an hour")
def test_a_silent_trainer_on_another_host_counts_as_stopped(world):
    silent = Presence("trainer", incarnation="x", beat=7)
    world.job.disk.make_directory(world.job.trainers)
    write_presence(world.job.disk, world.job.trainers, silent)
    explorer = world.open("explorer", "e0", ttl=0.5)
    assert explorer.get_trainer_status() is RUNNING
    assert explorer.wait_new_model_state_dict(0) == 0
    assert explorer.get_trainer_status() is STOPPED
    write_presence(world.job.disk, world.job.trainers, replace(silent, beat=8))
    assert explorer.get_trainer_status() is RUNNING


@pytest.mark.fault("a dead trainer looks alive for an hour")
def test_a_wait_ends_if_a_killed_trainer_has_no_successor(world):
    ended = {"boot": Process.current().boot, "namespace": Process.current().namespace, "pid": 1, "started": 1}
    killed = Presence("trainer", incarnation="x", beat=7, info={"process": ended})
    world.job.disk.make_directory(world.job.trainers)
    write_presence(world.job.disk, world.job.trainers, killed)
    explorer = world.open("explorer", "e0", ttl=0.6)
    call = explorer.later("wait_new_model_state_dict", 0)
    assert stays(call)
    assert call.result(LONG) == 0


@pytest.mark.fault("a dead explorer counts for ever")
def test_a_silent_explorer_on_another_host_counts_as_stopped(world):
    trainer = world.open("trainer", ttl=0.3)
    silent = Presence("far", REQUIRE_SYNC, incarnation="x", asked=1)
    world.job.disk.make_directory(world.job.explorers)
    write_presence(world.job.disk, world.job.explorers, silent)
    assert trainer.get_explorer_status_counts() == {RUNNING: 0, REQUIRE_SYNC: 1, STOPPED: 0}
    assert trainer.explorer_requires_sync()
    counted = {RUNNING: 0, REQUIRE_SYNC: 0, STOPPED: 1}
    eventually(lambda: trainer.get_explorer_status_counts() == counted)
    assert not trainer.explorer_requires_sync()


def test_an_observer_can_wait_without_writing_a_presence(world):
    observer = world.open()
    call = observer.later("wait_new_model_state_dict", 0)
    assert stays(call)
    publish(world, 2)
    assert call.result(LONG) == 2
    assert world.job.disk.list(world.job.explorers) == []
    assert world.job.disk.list(world.job.trainers) == []


def test_wait_for_returns_the_result_of_its_predicate(world, explorer):
    found = []
    call = explorer.later("wait_for", lambda: found and found[0])
    assert stays(call)
    found.append("it")
    assert call.result(LONG) == "it"
    with pytest.raises(TimedOutError):
        explorer.wait_for(lambda: False, timeout=0.02)


@pytest.mark.parametrize("timeout", [-1.0, float("inf"), float("nan")])
def test_wait_for_refuses_an_infinite_or_invalid_time_out(explorer, timeout):
    with pytest.raises(UsageError):
        explorer.wait_for(lambda: True, timeout=timeout)


# --- statuses and presence ------------------------------------------------------------------------------------


def test_statuses_are_set_and_read_by_identity(world, trainer, explorer):
    other = world.open("explorer", "e1")
    trainer.set_trainer_status("REQUIRE_SYNC")
    assert explorer.get_trainer_status() is REQUIRE_SYNC
    assert explorer.trainer_requires_weight_sync() is True
    trainer.set_trainer_status(RUNNING)
    assert explorer.trainer_requires_weight_sync() is False
    explorer.set_explorer_status(REQUIRE_SYNC, old_status=RUNNING)
    other.set_explorer_status(STOPPED)
    assert trainer.get_explorer_status_counts() == {RUNNING: 0, REQUIRE_SYNC: 1, STOPPED: 1}


@pytest.mark.parametrize(("status", "old"), [(STOPPED, REQUIRE_SYNC), (RUNNING, RUNNING)])
def test_an_invalid_change_of_status_is_refused(world, explorer, status, old):
    with pytest.raises(UsageError):
        explorer.set_explorer_status(status, old)
    assert world.explorer("e0").status is RUNNING


def test_methods_of_another_role_are_refused(trainer, explorer):
    with pytest.raises(UsageError):
        trainer.set_explorer_status(STOPPED)
    with pytest.raises(UsageError):
        explorer.notify_no_new_model_state_dict()
    with pytest.raises(UsageError):
        explorer.set_model_state_dict({}, 1)


def test_the_trainer_status_is_stopped_without_a_trainer(explorer):
    assert explorer.get_trainer_status() is STOPPED


def test_an_identity_has_one_holder_at_a_time(world):
    explorer = world.open("explorer", "e0")
    with pytest.raises(UsageError, match="in use by another"):
        world.open("explorer", "e0")
    explorer.close()
    again = world.open("explorer", "e0")
    assert world.explorer("e0").status is RUNNING
    again.close()
    assert world.explorer("e0").status is STOPPED


def test_an_identity_of_a_stopped_process_of_this_host_is_free_and_stays_its_successor_s(world, monkeypatch):
    monkeypatch.setattr("syncd.client.own_presence.CLAIM", 0.1)
    stopped = world.open("explorer", "e0", heartbeat=False)  # what does not beat could as well be stopped
    world.open("explorer", "e0")
    now = world.explorer("e0").incarnation
    time.sleep(0.2)
    with pytest.raises(UsageError, match="in use by another"):
        stopped.client.set_status(REQUIRE_SYNC)
    stopped.close()
    assert world.explorer("e0").incarnation == now
    assert world.explorer("e0").status is RUNNING


def test_a_trainer_that_lost_its_name_while_it_was_paused_is_fenced(world, monkeypatch):
    """It ends with 75, as everything does that another has replaced, and not as if it were called wrongly."""
    monkeypatch.setattr("syncd.client.own_presence.CLAIM", 0.1)
    job, fence = world.job, f"{world.job.state}/term"
    for directory in (job.trainers, fence):
        job.disk.make_directory(directory)
    paused = OwnPresence(job.disk, SystemClock(), job.trainers, "trainer", 0, fence=fence)
    paused.join()
    write_presence(job.disk, job.trainers, Presence("trainer", incarnation="another"))
    time.sleep(0.2)
    with pytest.raises(FencedError, match="has taken over the name 'trainer'"):
        paused.change()


def test_an_identity_of_another_host_is_taken_only_if_silent(world, monkeypatch):
    monkeypatch.setattr("syncd.client.own_presence.CLAIM", 0.3)
    far = Presence("e0", incarnation="x", asked=11)
    world.job.disk.make_directory(world.job.explorers)
    write_presence(world.job.disk, world.job.explorers, far)
    beats = threading.Timer(
        0.1, lambda: write_presence(world.job.disk, world.job.explorers, replace(far, beat=1))
    )
    beats.start()
    with pytest.raises(UsageError, match="in use by another"):
        world.open("explorer", "e0")
    beats.join()
    world.open("explorer", "e0")
    assert world.explorer("e0").asked == 11


def test_opening_a_missing_job_raises_and_creates_nothing(world, tmp_path):
    with pytest.raises(JobMissingError):
        world.api.open(f"{tmp_path}/absent", "explorer", "e0")
    assert not (tmp_path / "absent").exists()


def test_a_closed_synchronizer_refuses_calls(explorer):
    explorer.close()
    explorer.close()
    with pytest.raises(UsageError, match="closed"):
        explorer.wait_new_model_state_dict(0)


class Full(LocalDisk):
    """A disk that can run full."""

    full = False

    def replace(self, path, data, **more):
        if self.full:
            raise OSError(28, "No space left on device", path)
        super().replace(path, data, **more)


def test_a_failed_heartbeat_is_reported_by_the_next_call_and_retried(world):
    disk = Full()
    explorer = world.open("explorer", "e0", disk=disk, heartbeat=False)
    call = explorer.later("wait_new_model_state_dict", 0)
    eventually(asks(world))
    disk.full = True
    publish(world, 1)
    assert call.result(LONG) == 1  # the version is not lost over a status that cannot be written
    assert world.explorer("e0").status is REQUIRE_SYNC
    with pytest.raises(StorageError, match="No space"):
        explorer.get_latest_model_version()
    disk.full = False
    explorer.beat()
    assert world.explorer("e0").status is RUNNING
    assert explorer.get_latest_model_version() == 1


def test_a_heartbeat_with_a_taken_identity_fails_every_later_call(world):
    explorer = world.open("explorer", "e0", heartbeat=False)
    write_presence(world.job.disk, world.job.explorers, Presence("e0", incarnation="other"))
    explorer.client.own("explorer", "the next heartbeat").change_later()
    explorer.beat()
    for _ in range(2):
        with pytest.raises(UsageError, match="in use by another"):
            explorer.get_latest_model_version()
    explorer.close()
    assert world.explorer("e0").incarnation == "other"


def test_a_bug_in_the_heartbeat_is_reported_and_does_not_end_it(world, monkeypatch):
    explorer = world.open("explorer", "e0", heartbeat=False)
    monkeypatch.setattr(explorer.client.trainers, "read", lambda: 1 / 0)
    explorer.beat()
    with pytest.raises(SyncdError, match="ZeroDivisionError"):
        explorer.get_latest_model_version()
    assert explorer.get_latest_model_version() == 0


def test_the_heartbeat_runs_in_the_background(world, monkeypatch):
    monkeypatch.setattr("syncd.client.own_presence.HEARTBEAT", 0.05)
    monkeypatch.setattr("syncd.client.client.TICK", 0.02)
    world.open("explorer", "e0", poll=0.001)
    before = world.explorer("e0").beat
    eventually(lambda: world.explorer("e0").beat > before + 3)


def test_an_answer_carries_the_step_of_a_marker_written_by_the_engine(world, trainer):
    write_step(world.job, 9)
    trainer.notify_no_new_model_state_dict()
    assert world.trainer().step == read_marker(world.job.disk, world.job.marker).step == 9
