"""Agreement on a broadcast and the set-up of its group, with several explorers; control plane only."""

import asyncio
from dataclasses import replace

import pytest
from support.synchronizers import LONG, eventually, stays

from syncd.errors import TimedOutError, TryAgainError, UsageError
from syncd.protocol.presence import Presence, RunningStatus, write_presence
from syncd.protocol.rendezvous import (
    Acknowledgement,
    Offer,
    read_acknowledgements,
    write_acknowledgement,
    write_offer,
)

RUNNING, REQUIRE_SYNC = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC
META = [("w", "BF16", (2, 3))]


@pytest.fixture
def explorers(world):
    return [world.open("explorer", f"e{number}") for number in range(3)]


def statuses(world):
    return {world.explorer(f"e{number}").status for number in range(3)} | {world.trainer().status}


@pytest.mark.fault("two explorers break the broadcast")
def test_three_explorers_and_a_trainer_agree_on_every_step(world, trainer, explorers):
    for step in (3, 4, 5):
        calls = [explorer.later("ready_to_nccl_sync", "explorer") for explorer in explorers]
        calls.append(trainer.later("ready_to_nccl_sync", "trainer", step))
        assert [call.result(LONG) for call in calls] == [step] * 4
        assert statuses(world) == {RUNNING}
        assert not trainer.explorer_requires_sync()


def test_the_trainer_waits_for_all_living_explorers(world, trainer, explorers):
    first = explorers[0].later("ready_to_nccl_sync", "explorer")
    lead = trainer.later("ready_to_nccl_sync", "trainer", 7)
    assert stays(lead)
    assert not first.done()
    explorers[2].close()
    second = explorers[1].later("ready_to_nccl_sync", "explorer")
    assert [call.result(LONG) for call in (lead, first, second)] == [7, 7, 7]


def test_without_a_living_explorer_the_agreement_is_none_at_once(world, trainer):
    assert trainer.ready_to_nccl_sync("trainer", 1) is None
    world.open("explorer", "e0").close()
    assert trainer.ready_to_nccl_sync("trainer", 1) is None
    assert world.trainer().status is RUNNING


def test_an_explorer_does_not_wait_for_a_stopped_trainer(world, trainer, explorers):
    call = explorers[0].later("ready_to_nccl_sync", "explorer")
    eventually(lambda: world.explorer("e0").status is REQUIRE_SYNC)
    trainer.close()
    assert call.result(LONG) is None
    assert world.explorer("e0").status is RUNNING


@pytest.mark.fault("a wait that timed out leaves its status wrong")
def test_an_agreement_that_times_out_restores_both_statuses(world, trainer, explorers):
    assert explorers[0].ready_to_nccl_sync("explorer", timeout=0.05) is None
    assert trainer.ready_to_nccl_sync("trainer", 3, timeout=0.05) is None
    assert statuses(world) == {RUNNING}
    assert "agreed" not in world.trainer().info


@pytest.mark.fault("a wait that timed out leaves its status wrong")
def test_an_interrupted_agreement_restores_the_status(world, trainer, explorers):
    call = trainer.later("ready_to_nccl_sync", "trainer", 3)
    eventually(lambda: world.trainer().status is REQUIRE_SYNC)
    assert isinstance(trainer.give_up(call), KeyboardInterrupt | asyncio.CancelledError)
    assert statuses(world) == {RUNNING}


def test_an_agreement_written_at_the_last_moment_is_accepted(world, trainer, explorers, monkeypatch):
    # The explorer gives up just when the trainer has decided: its look after the withdrawal finds the record.
    def decide_late():
        own = trainer.client.own("trainer", "a decision")
        own.change(info={**own.info, "agreed": {"step": 9, "members": {"e0": 1}}})

    pace = explorers[0].client.poller.pace
    seconds = pace.next
    withdrawn = lambda: world.explorer("e0").asked == 1 and world.explorer("e0").status is RUNNING  # noqa: E731
    monkeypatch.setattr(pace, "next", lambda: (withdrawn() and decide_late()) or seconds())
    assert explorers[0].ready_to_nccl_sync("explorer", timeout=0.05) == 9


def test_an_agreement_is_valid_for_one_ask_only(world, trainer, explorers):
    calls = [explorer.later("ready_to_nccl_sync", "explorer") for explorer in explorers]
    assert trainer.ready_to_nccl_sync("trainer", 3) == 3
    assert [call.result(LONG) for call in calls] == [3, 3, 3]
    assert explorers[0].ready_to_nccl_sync("explorer", timeout=0.05) is None


def test_an_explorer_with_an_unseen_agreement_is_not_counted_twice(world, trainer):
    world.tick()
    slow = Presence("slow", REQUIRE_SYNC, incarnation="x", asked=1)
    write_presence(world.job.disk, world.job.explorers, slow)
    assert trainer.ready_to_nccl_sync("trainer", 3) == 3
    assert trainer.ready_to_nccl_sync("trainer", 4, timeout=0.05) is None
    assert world.trainer().info["agreed"] == {"step": 3, "members": {"slow": 1}}
    write_presence(world.job.disk, world.job.explorers, replace(slow, asked=2, beat=1))
    assert trainer.ready_to_nccl_sync("trainer", 4) == 4


def test_ready_to_nccl_sync_refuses_another_module(trainer):
    with pytest.raises(UsageError):
        trainer.ready_to_nccl_sync("daemon")
    with pytest.raises(UsageError):
        trainer.ready_to_nccl_sync("explorer")


# --- the group ------------------------------------------------------------------------------------------------


def form(trainer, explorers, port=4000):
    offer = trainer.setup_weight_sync_group("127.0.0.1", port, META)
    calls = [one.later("coordinate_weight_sync_setup") for one in (trainer, *explorers)]
    assert [call.result(LONG) for call in calls] == [offer] * (1 + len(explorers))
    return offer


def test_explorers_leave_a_broadcast_group_before_the_trainer(world, trainer, explorers):
    offer = form(trainer, explorers)
    assert (offer.world_size, offer.members) == (4, ("e0", "e1", "e2"))
    assert explorers[1].get_weight_sync_info() == ("127.0.0.1", 4000, META)
    assert not explorers[0].weight_sync_group_is_closing()
    leaving = trainer.later("coordinate_weight_sync_teardown")
    eventually(explorers[0].weight_sync_group_is_closing)
    for explorer in explorers:
        assert not leaving.done()
        assert explorer.teardown_weight_sync_group() == ()
    assert leaving.result(LONG) == ()
    assert trainer.get_weight_sync_info() is None


def test_a_group_formed_again_has_another_epoch(world, trainer, explorers):
    epochs = []
    for port in (4000, 4001):
        epochs.append(form(trainer, explorers, port).epoch)
        for one in (*explorers, trainer):
            one.teardown_weight_sync_group()
    assert epochs == [1, 2]


def test_a_dead_member_does_not_delay_the_teardown(world, trainer, explorers):
    form(trainer, explorers)
    explorers[0].teardown_weight_sync_group()
    explorers[1].close()
    explorers[2].close()
    assert trainer.teardown_weight_sync_group() == ()


def test_members_that_never_leave_are_returned_by_the_teardown(world, trainer, explorers):
    form(trainer, explorers)
    assert trainer.teardown_weight_sync_group(timeout=0.05) == ("e0", "e1", "e2")
    assert "group" not in world.trainer().info
    assert explorers[0].weight_sync_group_is_closing()


def test_an_incomplete_group_is_torn_down_after_a_time_out(world, trainer, explorers):
    trainer.setup_weight_sync_group("127.0.0.1", 4000, META)
    explorers[0].coordinate_weight_sync_setup()
    with pytest.raises(TimedOutError):
        trainer.coordinate_weight_sync_setup(timeout=0.05)
    assert explorers[0].weight_sync_group_is_closing()
    with pytest.raises(TimedOutError):
        explorers[1].coordinate_weight_sync_setup(timeout=0.05)


def test_a_dead_or_failed_member_ends_the_setup_at_once(world, trainer, explorers):
    trainer.setup_weight_sync_group("127.0.0.1", 4000, META)
    explorers[1].close()
    with pytest.raises(TryAgainError, match="e1 is gone"):
        trainer.coordinate_weight_sync_setup()
    offer = trainer.setup_weight_sync_group("127.0.0.1", 4000, META)
    failed = Acknowledgement("e2", "failed", message="no device")
    write_acknowledgement(world.job, offer.group, offer.epoch, failed)
    with pytest.raises(TryAgainError, match="no device"):
        trainer.coordinate_weight_sync_setup()


def test_an_offer_of_a_dead_trainer_is_not_joined(world, explorers):
    world.tick()
    left = Presence("old", RunningStatus.STOPPED, info={"group": {"name": "weights", "epoch": 1}})
    write_presence(world.job.disk, world.job.trainers, left)
    write_offer(world.job, Offer("weights", 1, "127.0.0.1", 3999, "nccl", 2, ("e0",)))
    call = explorers[0].later("coordinate_weight_sync_setup")
    assert stays(call)
    trainer = world.open("trainer")
    offer = trainer.setup_weight_sync_group("127.0.0.1", 4000, META)
    assert call.result(LONG) == offer
    assert offer.epoch == 2
    assert read_acknowledgements(world.job, "weights", 1) == {}
    assert read_acknowledgements(world.job, "weights", 2)["e0"].state == "joined"


def test_a_group_without_explorers_is_refused(trainer):
    with pytest.raises(TryAgainError):
        trainer.setup_weight_sync_group("127.0.0.1", 4000)
    with pytest.raises(UsageError):
        trainer.coordinate_weight_sync_setup()
    assert trainer.teardown_weight_sync_group() == ()
