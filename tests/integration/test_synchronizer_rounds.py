"""Rounds of a broadcast on the control plane, and what an explorer runs ahead of what is published."""

import os
import stat

import numpy as np
import pytest
from support.jobs import shard_bytes
from support.synchronizers import LONG, eventually, stays

from syncd.errors import TimedOutError, TryAgainError
from syncd.protocol.broadcast_round import FAILED, Round
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import RunningStatus
from syncd.protocol.rendezvous import Acknowledgement, write_acknowledgement
from syncd.protocol.version import Version
from syncd.protocol.writer import StepWriter

META = [("w", "F32", (2, 3))]


@pytest.fixture
def control(trainer):
    return trainer.broadcasts()


@pytest.fixture
def member(explorer):
    return explorer.broadcasts()


def publish(world, trainer, step, value=1.0):
    """Publish a step through files and return the attempt of its save."""
    trainer.set_model_state_dict({"w": np.full((2, 3), value, np.float32)}, step)
    world.tick()
    return read_manifest(world.job.disk, world.job.step(step)).attempt


def rounded(step, attempt, members, generation=1, epoch=1):
    return Round(step, attempt, generation, epoch, "xxh3_128:0", 5.0, members)


def agreed(control, member, step=1, attempt="a"):
    """Have both sides agree and open a round; return what the explorer's wait returned."""
    call = member.later("wait_for_weights", -1)
    asks = control.agree(step)
    assert asks == {"e0": 1}
    control.open_round(rounded(step, attempt, asks))
    return call.result(LONG)


def offered(control):
    return control.offer_group("127.0.0.1", 4000, META, secret="s")


def test_a_round_reaches_its_asker_and_ends_for_both_sides(world, explorer, control, member):
    came = agreed(control, member)
    assert (came.step, came.attempt, came.members) == (1, "a", {"e0": 1})
    follow = member.later("wait_for_end", came)
    assert stays(follow)
    control.end_round(came, "sum")
    assert follow.result(LONG) is True
    assert world.explorer("e0").status is RunningStatus.RUNNING


def test_an_explorer_asks_again_after_a_failed_round(world, trainer, control, member):
    came = agreed(control, member)
    follow = member.later("wait_for_end", came)
    control.end_round(came, None)
    assert follow.result(LONG) is False
    again = member.later("wait_for_weights", -1)
    assert stays(again)
    publish(world, trainer, 1)
    assert again.result(LONG).pair == (1, 1)


def test_a_round_fails_when_the_trainer_closes(trainer, control, member):
    came = agreed(control, member)
    follow = member.later("wait_for_end", came)
    trainer.close()
    assert follow.result(LONG) is False


def test_an_agreement_keeps_an_explorer_waiting_for_its_round(world, trainer, control, member):
    call = member.later("wait_for_weights", -1)
    asks = control.agree(2)
    assert asks == {"e0": 1}
    publish(world, trainer, 1)
    assert stays(call), "the version must not take it out of a round that counts on it"
    control.open_round(rounded(2, "a", asks))
    assert call.result(LONG).step == 2


def test_only_explorers_that_take_part_are_members(world, explorer, control, member):
    world.open("explorer", "plain")
    assert control.members("gloo") == {}
    member.take_part("gloo")
    assert set(control.members("gloo")) == {"e0"}
    assert control.members("nccl") == {}
    assert not member.is_wanted()
    control.take_part("gloo")
    call = control.later("agree", 1, members={"e0"})
    eventually(member.is_wanted)
    came = member.later("wait_for_weights", -1)
    asks = call.result(LONG)
    assert asks == {"e0": 1}
    control.open_round(rounded(1, "a", asks))
    assert came.result(LONG).members == {"e0": 1}
    member.take_part(None)
    assert control.members("gloo") == {}


def test_an_offer_is_private_and_removed_with_its_group(world, explorer, control):
    for _ in range(2):
        offer = offered(control)
        path = f"{world.job.rendezvous}/weights/{offer.epoch}/offer.json"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(f"{world.job.rendezvous}/weights") == ["2"]
    control.drop_group()
    assert os.listdir(f"{world.job.rendezvous}/weights/2") == []
    assert offered(control).epoch == 3, "epochs go on"


def test_every_member_must_confirm_the_same_digest(world, explorer, control, member):
    other = world.open("explorer", "e1").broadcasts()
    offer, sent = offered(control), rounded(1, "a", {})
    call = control.later("wait_received", sent, offer, "sum", 5.0)
    member.acknowledge(offer, sent, "sum")
    assert stays(call)
    other.acknowledge(offer, sent, "sum")
    assert call.result(LONG) is None
    with pytest.raises(TimedOutError):
        control.wait_received(rounded(2, "b", {}), offer, "sum", 0.05)
    other.acknowledge(offer, sent, "mus")
    with pytest.raises(TryAgainError, match="something else"):
        control.wait_received(sent, offer, "sum", 5.0)
    write_acknowledgement(world.job, "weights", offer.epoch, Acknowledgement("e1", "failed", message="no"))
    with pytest.raises(TryAgainError, match="e1 has failed: no"):
        control.wait_received(sent, offer, "sum", 5.0)


def test_waiting_for_a_dead_member_fails_at_once(explorer, control, member):
    offer = offered(control)
    explorer.close()
    with pytest.raises(TryAgainError, match="is gone"):
        control.wait_received(rounded(1, "a", {}), offer, "sum", 5.0)


# --- ahead of what is published --------------------------------------------------------------------------------


def ahead(member, step, attempt, generation=1):
    member.set_ahead(rounded(step, attempt, {"e0": 1}, generation))


def test_received_weights_are_confirmed_once_published(world, trainer, explorer, member):
    publish(world, trainer, 1)
    assert explorer.wait_new_model_state_dict(-1) == 1
    explorer.confirm(1)
    writer = publish_later(world, trainer, 2)
    ahead(member, 2, writer.attempt)
    assert world.explorer("e0").applied == (1, 1), "what is not published is not applied"
    assert world.explorer("e0").info["ahead"]["step"] == 2
    assert not member.confirm_published()
    writer.announce()
    world.tick()
    assert member.confirm_published()
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


def test_other_weights_under_the_same_step_are_a_new_version(world, trainer, explorer, member):
    """The trainer died before its files were whole, and made the step again."""
    ahead(member, 1, "lost")
    publish(world, trainer, 1)
    assert not member.confirm_published()
    came = member.wait_for_weights(1)
    assert isinstance(came, Version)
    assert came.pair == (1, 1)
    explorer.confirm(came)
    assert "ahead" not in world.explorer("e0").info


def test_an_older_step_that_is_published_late_is_skipped(world, trainer, member):
    ahead(member, 3, "a")
    publish(world, trainer, 2)
    call = member.later("wait_for_weights", 3)
    assert stays(call)
    publish(world, trainer, 4)
    assert call.result(LONG).pair == (1, 4)


def test_a_new_generation_is_always_followed(world, trainer, member):
    publish(world, trainer, 1)
    publish(world, trainer, 2)
    ahead(member, 3, "a")
    trainer.set_model_state_dict(None, 1, rewind=True)
    world.tick()
    eventually(lambda: (world.tick(), world.pair() == (2, 1))[1])
    assert member.wait_for_weights(3).pair == (2, 1)


def test_a_round_that_failed_before_it_opened_has_state_failed(control, member):
    call = member.later("wait_for_weights", -1)
    asks = control.agree(1)
    assert asks == {"e0": 1}
    control.end_round(rounded(1, "a", asks), None)
    assert call.result(LONG).state == FAILED
