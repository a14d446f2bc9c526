"""Rounds of a broadcast on the control plane, and what an explorer runs ahead of what is published."""

import os
import stat

import numpy as np
import pytest
from jobs import shard_bytes
from synchronizers import LONG, eventually, stays

from syncd.errors import TimedOutError, TryAgainError
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import RunningStatus
from syncd.protocol.rendezvous import Acknowledgement, write_acknowledgement
from syncd.protocol.round import FAILED, Round
from syncd.protocol.version import Version
from syncd.protocol.writer import StepWriter

META = [("w", "F32", (2, 3))]


def publish(world, trainer, step, value=1.0):
    """Publish a step through files and return the attempt of its save."""
    trainer.set_model_state_dict({"w": np.full((2, 3), value, np.float32)}, step)
    world.tick()
    return read_manifest(world.job.disk, world.job.step(step)).attempt


def rounded(step, attempt, members, generation=1, epoch=1):
    return Round(step, attempt, generation, epoch, "xxh3_128:0", 5.0, members)


def agreed(trainer, explorer, step=1, attempt="a"):
    """Have both sides agree and open a round; return what the explorer's wait returned."""
    call = explorer.later("wait_for_round_or_version", -1)
    assert trainer.ready_to_nccl_sync("trainer", step) == step
    trainer.open_round(rounded(step, attempt, trainer.agreed_members()))
    return call.result(LONG)


def offered(trainer):
    return trainer.setup_weight_sync_group("127.0.0.1", 4000, META, secret="s")


def test_a_round_reaches_who_asks_and_ends_for_all_alike(world, trainer, explorer):
    came = agreed(trainer, explorer)
    assert (came.step, came.attempt, came.members) == (1, "a", {"e0": 1})
    follow = explorer.later("follow_round", came)
    assert stays(follow)
    trainer.end_round(came, "sum")
    assert follow.result(LONG) is True
    assert world.explorer("e0").status is RunningStatus.RUNNING


def test_a_failed_round_is_told_and_the_explorer_asks_again(world, trainer, explorer):
    came = agreed(trainer, explorer)
    follow = explorer.later("follow_round", came)
    trainer.end_round(came, None)
    assert follow.result(LONG) is False
    again = explorer.later("wait_for_round_or_version", -1)
    assert stays(again)
    publish(world, trainer, 1)
    assert again.result(LONG).pair == (1, 1)


def test_a_trainer_that_goes_ends_a_round(trainer, explorer):
    came = agreed(trainer, explorer)
    follow = explorer.later("follow_round", came)
    trainer.close()
    assert follow.result(LONG) is False


def test_an_agreement_holds_an_explorer_until_its_round_comes(world, trainer, explorer):
    call = explorer.later("wait_for_round_or_version", -1)
    assert trainer.ready_to_nccl_sync("trainer", 2) == 2
    publish(world, trainer, 1)
    assert stays(call), "the version must not take it out of a round that counts on it"
    trainer.open_round(rounded(2, "a", trainer.agreed_members()))
    assert call.result(LONG).step == 2


def test_only_those_who_take_part_are_members(world, trainer, explorer):
    world.open("explorer", "plain")
    assert trainer.broadcast_members("gloo") == {}
    explorer.take_part("gloo")
    assert set(trainer.broadcast_members("gloo")) == {"e0"}
    assert trainer.broadcast_members("nccl") == {}
    assert not explorer.broadcast_wanted()
    trainer.take_part("gloo")
    call = trainer.later("ready_to_nccl_sync", "trainer", 1, members={"e0"})
    eventually(explorer.broadcast_wanted)
    came = explorer.later("wait_for_round_or_version", -1)
    assert call.result(LONG) == 1
    trainer.open_round(rounded(1, "a", trainer.agreed_members()))
    assert came.result(LONG).members == {"e0": 1}
    explorer.take_part(None)
    assert trainer.broadcast_members("gloo") == {}


def test_an_offer_is_for_its_own_user_only_and_leaves_nothing(world, trainer, explorer):
    for _ in range(2):
        offer = offered(trainer)
        path = f"{world.job.rendezvous}/weights/{offer.epoch}/offer.json"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(f"{world.job.rendezvous}/weights") == ["2"]
    trainer.end_group()
    assert os.listdir(f"{world.job.rendezvous}/weights/2") == []
    assert offered(trainer).epoch == 3, "epochs go on"


def test_every_member_must_confirm_the_very_bytes(world, trainer, explorer):
    other = world.open("explorer", "e1")
    offer, sent = offered(trainer), rounded(1, "a", {})
    call = trainer.later("confirm_received", sent, offer, "sum", 5.0)
    explorer.acknowledge_round(offer, sent, "sum")
    assert stays(call)
    other.acknowledge_round(offer, sent, "sum")
    assert call.result(LONG) is None
    with pytest.raises(TimedOutError):
        trainer.confirm_received(rounded(2, "b", {}), offer, "sum", 0.05)
    other.acknowledge_round(offer, sent, "mus")
    with pytest.raises(TryAgainError, match="something else"):
        trainer.confirm_received(sent, offer, "sum", 5.0)
    write_acknowledgement(world.job, "weights", offer.epoch, Acknowledgement("e1", "failed", message="no"))
    with pytest.raises(TryAgainError, match="e1 has failed: no"):
        trainer.confirm_received(sent, offer, "sum", 5.0)


def test_a_dead_member_is_not_waited_for(world, trainer, explorer):
    offer = offered(trainer)
    explorer.close()
    with pytest.raises(TryAgainError, match="has gone"):
        trainer.confirm_received(rounded(1, "a", {}), offer, "sum", 5.0)


# --- ahead of what is published --------------------------------------------------------------------------------


def ahead(explorer, step, attempt, generation=1):
    explorer.set_ahead(rounded(step, attempt, {"e0": 1}, generation))


def test_what_was_received_is_confirmed_once_it_is_published(world, trainer, explorer):
    publish(world, trainer, 1)
    assert explorer.wait_new_model_state_dict(-1) == 1
    explorer.confirm(1)
    writer = publish_later(world, trainer, 2)
    ahead(explorer, 2, writer.attempt)
    assert world.explorer("e0").applied == (1, 1), "what is not published is not applied"
    assert world.explorer("e0").info["ahead"]["step"] == 2
    assert not explorer.confirm_published()
    writer.announce()
    world.tick()
    assert explorer.confirm_published()
    assert world.explorer("e0").applied == (1, 2)
    assert "ahead" not in world.explorer("e0").info
    assert explorer.wait_new_model_state_dict(2, no_wait=True) == 2


def publish_later(world, trainer, step):
    """Seal a step that nobody announces yet; return its writer."""
    writer = StepWriter(world.job, step, 1, f"attempt-{step}")
    writer.begin()
    shard = writer.write("actor/model-00001-of-00001.safetensors", shard_bytes({"w": (2, 3)}), tensors=1)
    writer.receipt(1, [shard])
    writer.seal()
    return writer


def test_other_weights_under_the_same_number_are_news(world, trainer, explorer):
    """The trainer died before its files were whole, and made the step again."""
    ahead(explorer, 1, "lost")
    publish(world, trainer, 1)
    assert not explorer.confirm_published()
    came = explorer.wait_for_round_or_version(1)
    assert isinstance(came, Version)
    assert came.pair == (1, 1)
    explorer.confirm(came)
    assert "ahead" not in world.explorer("e0").info


def test_an_older_step_that_is_published_late_is_passed_over(world, trainer, explorer):
    ahead(explorer, 3, "a")
    publish(world, trainer, 2)
    call = explorer.later("wait_for_round_or_version", 3)
    assert stays(call)
    publish(world, trainer, 4)
    assert call.result(LONG).pair == (1, 4)


def test_another_generation_is_always_followed(world, trainer, explorer):
    publish(world, trainer, 1)
    publish(world, trainer, 2)
    ahead(explorer, 3, "a")
    trainer.set_model_state_dict(None, 1, rewind=True)
    world.tick()
    eventually(lambda: (world.tick(), world.pair() == (2, 1))[1])
    assert explorer.wait_for_round_or_version(3).pair == (2, 1)


def test_a_round_that_failed_is_known_as_such(trainer, explorer):
    call = explorer.later("wait_for_round_or_version", -1)
    assert trainer.ready_to_nccl_sync("trainer", 1) == 1
    trainer.end_round(rounded(1, "a", trainer.agreed_members()), None)
    assert call.result(LONG).state == FAILED
