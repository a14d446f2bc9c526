"""Steps that trainers publish, leases, and weights that are read back, over both kinds of synchronizer."""

import contextlib
import os
import threading

import numpy as np
import pytest
from safetensors.numpy import load
from support.foreign_jobs import archive
from support.jobs import shard_bytes, steps_of, write_step
from support.synchronizers import LONG, eventually, stays

from syncd.client import state_dict
from syncd.client.state_dict import StateFile, foreign_shards, iterate_state
from syncd.errors import CorruptDataError, NotReadyError, TimedOutError, TryAgainError, UsageError
from syncd.protocol.manifest import read_manifest
from syncd.protocol.probe import Probe
from syncd.protocol.request import Pin, read_requests, write_pin
from syncd.protocol.version import read_marker, write_marker
from syncd.protocol.writer import StepWriter


def marker(world):
    return read_marker(world.job.disk, world.job.marker).step


def state(step):
    return {"w": np.full((2, 3), step, np.float32), "b": np.arange(step, step + 4, dtype=np.int64)}


def values(tensors):
    kinds = {"F32": np.float32, "I64": np.int64}
    return {
        name: np.frombuffer(t.data, kinds[t.dtype]).reshape(t.shape).tolist() for name, t in tensors.items()
    }


def plain(arrays):
    return {name: array.tolist() for name, array in arrays.items()}


# --- publishing -----------------------------------------------------------------------------------------------


def test_a_published_state_dict_round_trips(world, trainer, explorer):
    assert trainer.set_model_state_dict(state(3), 3) == 3
    world.tick()
    assert explorer.wait_new_model_state_dict(-1) == 3
    tensors, version = explorer.get_model_state_dict()
    assert (values(tensors), version) == (plain(state(3)), 3)
    assert values(dict(explorer.get_model_state_dict_iterator())) == plain(state(3))
    assert sorted(explorer.get_state_dict_meta()) == [("b", "I64", (4,)), ("w", "F32", (2, 3))]
    assert world.explorer("e0").leases == ()


def test_a_state_dict_that_cannot_be_written_leaves_no_attempt(world, trainer):
    with pytest.raises(UsageError, match="its shape takes 8"):
        trainer.publish(state(4) | {"w": ("F32", (2,), b"123")}, 4)
    assert [name for name in os.listdir(world.job.root) if "global_step" in name] == []
    write_step(world.job, 3)
    assert trainer.publish_received() == 3


PROBE = Probe(((5, 6, 7),), ((-0.5, -2.25),), "float32", "keep")


def test_a_probe_is_published_with_a_state_dict_or_a_uri(world, trainer):
    trainer.publish(state(3), 3, probe=PROBE)
    trainer.publish("tinker://run/4", 4, probe=PROBE)
    trainer.publish(state(5), 5)
    found = [read_manifest(world.job.disk, world.job.step(step)).probe for step in (3, 4, 5)]
    assert found == [PROBE, PROBE, None]
    with pytest.raises(UsageError, match="takes no probe"):
        trainer.publish(None, 5, probe=PROBE)


def test_before_the_first_version_all_results_are_empty(explorer):
    assert explorer.get_model_state_dict() == (None, 0)
    assert explorer.get_latest_model_version() == 0
    assert explorer.get_latest_model_path() is None
    assert explorer.get_state_dict_meta() == []
    assert list(explorer.get_model_state_dict_iterator()) == []


def test_latest_paths_are_those_of_the_version(world, trainer, explorer):
    trainer.set_model_state_dict(state(3), 3)
    world.tick()
    actor = f"{world.job.root}/global_step_3/actor"
    assert explorer.get_latest_model_path() == actor
    assert explorer.get_latest_model_path(use_huggingface=True) == actor
    world.job.disk.make_directory(f"{actor}/huggingface")
    assert explorer.get_latest_model_path(use_huggingface=True) == f"{actor}/huggingface"


def test_a_remote_step_is_returned_as_its_uri(world, trainer, explorer):
    trainer.set_model_state_dict("tinker://run/sampler/7", 7)
    world.tick()
    assert explorer.wait_new_model_state_dict(-1) == 7
    assert explorer.get_latest_model_path() == "tinker://run/sampler/7"
    assert explorer.get_model_state_dict() == ("tinker://run/sampler/7", 7)
    with explorer.lease(7) as leased:
        assert leased.path == "tinker://run/sampler/7"


def test_a_sealed_step_is_announced_without_a_state_dict(world, trainer):
    write_step(world.job, 4, announce=False)
    assert marker(world) is None
    assert trainer.set_model_state_dict(None, 4) == 4
    assert marker(world) == 4
    assert world.trainer().step == 4
    with pytest.raises(NotReadyError):
        trainer.set_model_state_dict(None, 5)
    assert marker(world) == 4


def test_a_sealed_step_is_not_rewritten(world, trainer):
    trainer.set_model_state_dict(state(3), 3)
    with pytest.raises(UsageError, match="complete already"):
        trainer.set_model_state_dict(state(9), 3)


@pytest.mark.fault("out-of-order publishes assert")
def test_a_late_save_does_not_move_explorers_back(world, trainer, explorer):
    assert trainer.set_model_state_dict(state(4), 4) == 4
    assert trainer.set_model_state_dict(state(2), 2) == 4
    assert marker(world) == 4
    world.tick()
    assert explorer.wait_new_model_state_dict(-1) == 4
    assert world.pair() == (1, 4)


def test_a_version_is_sealed_once_all_receipts_exist(world, trainer):
    writer = StepWriter(world.job, 5, 3, "save-1")
    writer.begin()
    for rank in (1, 2, 3):
        content = shard_bytes({f"layer.{rank}": (2, 2)})
        writer.receipt(
            rank, [writer.write(f"actor/model-{rank:05d}-of-00003.safetensors", content, tensors=1)]
        )
        assert trainer.checkpoint_shard_counter(5) == rank
        done = trainer.set_model_state_dict_with_step_num(5, 3)
        assert done == (5 if rank == 3 else 0)
    assert marker(world) == 5
    assert trainer.set_model_state_dict_with_step_num() == 5


def test_a_late_rank_does_not_move_the_marker_back(world):
    rank = world.open()
    for step in (1, 2):
        write_step(world.job, step, world_size=2)
    assert rank.set_model_state_dict_with_step_num(1, 2) == 2
    assert marker(world) == 2


def test_receipts_of_another_world_size_do_not_count(world, trainer):
    writer = StepWriter(world.job, 5, 1, "save-1")
    writer.begin()
    writer.receipt(
        1, [writer.write("actor/model-00001-of-00001.safetensors", shard_bytes({"a": (1,)}), tensors=1)]
    )
    assert trainer.set_model_state_dict_with_step_num(5, 2) == 0
    assert trainer.set_model_state_dict_with_step_num(5, 1) == 5


# --- leases ---------------------------------------------------------------------------------------------------


def test_a_leased_step_is_kept_while_it_is_read(world, explorer):
    write_step(world.job, 1)
    world.tick()
    with explorer.lease(1) as leased:
        assert world.explorer("e0").leases == (1,)
        assert world.explorer("e0").loading == (1, 1)
        assert leased.manifest.step == 1
        for step in (2, 3, 4):
            write_step(world.job, step)
            world.tick()
        assert 1 in steps_of(world.job)
        assert world.job.disk.list(leased.path)
    assert world.explorer("e0").leases == ()
    assert world.explorer("e0").loading is None


def test_a_lease_of_a_removed_step_fails_with_a_hint_to_the_newest(world, explorer):
    for step in (1, 2, 3, 4):
        write_step(world.job, step)
        world.tick()
        explorer.get_latest_model_version()
    assert 1 not in steps_of(world.job)
    with pytest.raises(TryAgainError) as caught, explorer.lease(1):
        pass
    assert "newest" in caught.value.hint
    assert world.explorer("e0").leases == ()
    with explorer.lease(explorer.get_latest_model_version()) as leased:
        assert leased.version.pair == (1, 4)


def test_any_complete_step_can_be_leased(world, explorer):
    for step in (1, 2):
        write_step(world.job, step)
    world.tick()
    with explorer.lease(1) as leased:
        assert leased.path == f"{world.job.root}/global_step_1/actor"


def test_a_lease_of_a_rewritten_step_is_refused(world, explorer):
    write_step(world.job, 1)
    world.tick()
    offered = explorer.latest_version()
    world.job.disk.rename(world.job.step(1), f"{world.root}/aside")
    write_step(world.job, 1, salt=77)
    with pytest.raises(TryAgainError, match="written again"), explorer.lease(offered):
        pass


def test_a_lease_by_number_after_a_rewind_is_the_current_content(world, trainer):
    trainer.set_model_state_dict(state(1), 1)
    trainer.set_model_state_dict(state(3), 3)
    world.tick()
    with trainer.lease(3) as leased:
        before = leased.manifest.digest
    trainer.set_model_state_dict(None, 1, rewind=True)
    world.tick()
    world.job.disk.rename(world.job.step(3), f"{world.root}/aside")
    trainer.set_model_state_dict(state(33), 3)  # no daemon has looked since
    with trainer.lease(3) as leased:
        assert leased.manifest.digest != before
        assert world.trainer().leases == (3,)


def test_a_trainer_can_lease_a_step_and_an_observer_cannot(world, trainer):
    trainer.set_model_state_dict(state(1), 1)
    world.tick()
    with trainer.lease(1):
        assert world.trainer().leases == (1,)
        for step in (2, 3, 4):
            trainer.set_model_state_dict(state(step), step)
            world.tick()
        assert steps_of(world.job) == [1, 3, 4]
    with pytest.raises(UsageError), world.open().lease(4):
        pass


def test_nested_leases_end_one_by_one(world, explorer):
    for step in (1, 2):
        write_step(world.job, step)
    world.tick()
    with explorer.lease(1):
        with explorer.lease(1), explorer.lease(2):
            assert world.explorer("e0").leases == (1, 2)
        assert world.explorer("e0").leases == (1,)
    assert world.explorer("e0").leases == ()


@pytest.mark.fault("the version is set before the weights are loaded")
def test_a_version_counts_as_applied_only_after_the_load(world, explorer):
    write_step(world.job, 1)
    world.tick()
    assert explorer.wait_new_model_state_dict(-1) == 1
    assert world.explorer("e0").applied is None
    with contextlib.suppress(MemoryError), explorer.lease(1):
        assert world.explorer("e0").applied is None
        raise MemoryError  # the load fails
    assert world.explorer("e0").applied is None
    assert explorer.wait_new_model_state_dict(-1) == 1
    with explorer.lease(1):
        pass
    explorer.confirm(1)
    assert world.explorer("e0").applied == (1, 1)


def test_newness_is_relative_to_the_confirmed_version(world, trainer, explorer):
    for step in (4, 8):
        write_step(world.job, step)
        world.tick()
        explorer.wait_new_model_state_dict(-1)
        if step == 4:
            explorer.confirm(4)
    trainer.set_model_state_dict(None, 4, rewind=True)
    world.tick()
    assert explorer.wait_new_model_state_dict(8) == 4
    # It could not load (2, 4), and still runs (1, 4): the step is the same, the version is not.
    assert explorer.wait_new_model_state_dict(4) == 4
    explorer.confirm(explorer.latest_version())
    with pytest.raises(TimedOutError):
        explorer.wait_new_model_state_dict(4, timeout=0.05)


def test_a_version_that_was_never_offered_cannot_be_confirmed(explorer):
    with pytest.raises(UsageError):
        explorer.confirm(12)


# --- reading back ---------------------------------------------------------------------------------------------


def test_payload_and_version_match_during_concurrent_publishing(world, trainer, explorer):
    world.run()
    seen, problems = set(), []

    def publish():
        for step in range(1, 26):
            trainer.set_model_state_dict(state(step), step)

    writing = threading.Thread(target=publish)
    writing.start()
    while writing.is_alive() or explorer.get_latest_model_version() < 25:
        tensors, version = explorer.get_model_state_dict()
        if version:
            seen.add(version)
            if values(tensors) != plain(state(version)):
                problems.append(version)
    writing.join()
    assert problems == []
    assert len(seen) > 2


@pytest.mark.parametrize(
    "read",
    [
        lambda explorer: explorer.get_model_state_dict()[0],
        lambda explorer: dict(explorer.get_model_state_dict_iterator()),
    ],
    ids=["at once", "one by one"],
)
def test_a_version_removed_before_the_read_is_replaced_by_the_newest(
    world, trainer, explorer, monkeypatch, read
):
    looks = []
    for step in (1, 2, 3, 4):
        trainer.set_model_state_dict(state(step), step)
        world.tick()
        looks.append(explorer.latest_version())
    assert 1 not in steps_of(world.job)
    versions, latest = explorer.client.versions, explorer.client.versions.latest
    monkeypatch.setattr(versions, "latest", lambda: looks.pop(0) if len(looks) > 2 else latest())
    assert values(read(explorer)) == plain(state(4))
    assert world.explorer("e0").leases == ()


def test_damaged_weights_are_refused(world, trainer, explorer):
    trainer.set_model_state_dict(state(3), 3)
    world.tick()
    path = f"{world.job.step(3)}/actor/model-00001-of-00001.safetensors"
    data = bytearray(world.job.disk.read(path))
    data[-1] ^= 1
    world.job.disk.replace(path, bytes(data))
    with pytest.raises(CorruptDataError):
        explorer.get_model_state_dict()
    assert world.explorer("e0").leases == ()


def _foreign_step(world, step, files):
    place = f"{world.root}/global_step_{step}/actor"
    world.job.disk.make_directory(place)
    for name, data in files.items():
        world.job.disk.replace(f"{place}/{name}", data)
    write_marker(world.job.disk, world.job.marker, step)
    eventually(lambda: (world.tick(), world.pair())[1])
    return place


def test_foreign_weights_are_read_as_the_seeds_read_theirs(world, explorer):
    shards = {
        "model-00001-of-00002.safetensors": shard_bytes({"a": (2,)}),
        "model-00002-of-00002.safetensors": shard_bytes({"b": (2, 3), "c": (1,)}),
    }
    place = _foreign_step(world, 2, {**shards, "optimizer.bin": b"other"})
    assert explorer.wait_new_model_state_dict(-1) == 2
    with explorer.lease(2) as leased:
        assert (leased.path, leased.manifest) == (place, None)
    tensors, step = explorer.get_model_state_dict()
    assert step == 2
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"a": (2,), "b": (2, 3), "c": (1,)}
    by_library = {name: value for data in shards.values() for name, value in load(data).items()}
    assert {name: bytes(tensor.data) for name, tensor in tensors.items()} == {
        name: value.tobytes() for name, value in by_library.items()
    }
    assert dict(explorer.get_model_state_dict_iterator()) == tensors
    assert [(name, shape) for name, _, shape in explorer.get_state_dict_meta()] == [
        (name, tensor.shape) for name, tensor in tensors.items()
    ]
    assert world.explorer("e0").leases == ()


def test_a_foreign_step_that_is_written_again_while_it_is_read_is_never_mixed(world):
    files = {
        f"model-0000{number}-of-00002.safetensors": shard_bytes({f"t{number}": (4,)}) for number in (1, 2)
    }
    place, disk = _foreign_step(world, 2, files), world.job.disk
    tensors = iterate_state([StateFile(disk, path) for path in foreign_shards(disk, place)])
    next(tensors)
    disk.replace(f"{place}/model-00002-of-00002.safetensors", shard_bytes({"t2": (4,)}))
    with pytest.raises(TryAgainError, match="written again"):
        next(tensors)


def test_a_foreign_file_that_is_written_again_behind_its_header_is_never_mixed(world, monkeypatch):
    name, disk = "model.safetensors", world.job.disk
    place = _foreign_step(world, 2, {name: shard_bytes({"t1": (4,), "t2": (4,)})})
    read = state_dict.read_weights_header

    def written_again(disk, path):
        header = read(disk, path)
        disk.replace(path, shard_bytes({"t2": (4,), "t3": (4,)}))
        return header

    monkeypatch.setattr(state_dict, "read_weights_header", written_again)
    with pytest.raises(TryAgainError, match="written again"):
        next(iterate_state([StateFile(disk, f"{place}/{name}")]))


def test_foreign_weights_that_are_no_safetensors_name_the_command_that_reads_them(world, explorer):
    _foreign_step(world, 2, {"model_world_size_1_rank_0.pt": archive()})
    with pytest.raises(UsageError, match="layout verl-fsdp has no safetensors") as refused:
        explorer.get_model_state_dict()
    assert refused.value.hint.startswith("trainer ")


# --- vacating -------------------------------------------------------------------------------------------------


def test_a_vacated_step_can_be_written_again(world, trainer, explorer):
    for step in (4, 8):
        trainer.set_model_state_dict(state(step), step)
        world.tick()
    assert explorer.wait_new_model_state_dict(-1) == 8
    trainer.set_model_state_dict(None, 4, rewind=True)
    world.run()
    trainer.vacate(8)
    assert 8 not in steps_of(world.job)
    trainer.set_model_state_dict(state(80), 8)
    eventually(lambda: world.pair() == (2, 8))
    assert explorer.wait_new_model_state_dict(8) == 8
    assert values(explorer.get_model_state_dict()[0]) == plain(state(80))


def test_vacating_a_pinned_step_is_refused(world):
    trainer = world.open("trainer", poll=0.001)
    for step in (4, 8):
        trainer.set_model_state_dict(state(step), step)
        world.tick()
    write_pin(world.job, Pin(8))
    trainer.set_model_state_dict(None, 4, rewind=True)
    world.run()
    with pytest.raises(TryAgainError, match="keeps step 8"):
        trainer.vacate(8)


def test_vacating_without_a_daemon_times_out_and_removes_its_request(world, trainer):
    trainer.set_model_state_dict(state(4), 4)
    with pytest.raises(TimedOutError) as caught:
        trainer.vacate(4, timeout=0.05)
    assert caught.value.hint == f"syncd watch {world.job.root}"
    assert read_requests(world.job) == ()
    call = trainer.later("vacate", 4)
    assert stays(call)
    trainer.give_up(call)
    assert read_requests(world.job) == ()


def test_vacating_a_missing_step_returns_at_once(trainer):
    assert trainer.later("vacate", 99).result(LONG) is None
