"""Attempts to write a step: whatever one that was paused does later, what another has sealed stays as it is.

"Paused" is exact here: the disk of one writer stops at its k-th call, the others do all of theirs, and then it
continues. Every k is tried.
"""

import os
import uuid

import pytest
from support.jobs import ManualClock, shard_bytes, start, write_step
from support.pausing import Pausing

from syncd.client.client import Client
from syncd.errors import AlreadySealedError, FencedError, SaveLostError, UsageError
from syncd.protocol.layout import Job, parse_attempt_name
from syncd.protocol.manifest import (
    damaged_files,
    encode_manifest,
    from_receipts,
    missing_files,
    read_manifest,
)
from syncd.protocol.receipt import Receipt, write_receipt
from syncd.protocol.version import read_marker
from syncd.protocol.writer import StepWriter

STEP = 7


def save(job, attempt, *, world_size=1, salt=0, fence="", announce=True):
    """Write and seal a step as all of its ranks, one after the other."""
    for rank in range(1, world_size + 1):
        writer = StepWriter(job, STEP, world_size, attempt, ManualClock(), fence=fence)
        writer.begin()
        name = f"actor/model-{rank:05d}-of-{world_size:05d}.safetensors"
        writer.receipt(rank, [writer.write(name, shard_bytes({f"w{rank}": (64,)}, salt), tensors=1)])
        sealed = writer.seal()
    if sealed and announce:
        writer.announce()
    return sealed


def calls_of(make, tmp_path, **options):
    disk = Pausing(None, None)
    save(Job.at(make(tmp_path / "counted"), disk=disk), "counted", **options)
    return disk.calls


def made(path):
    path.mkdir(parents=True)
    return path


def is_whole(job):
    manifest = read_manifest(job.disk, job.step(STEP))
    return not missing_files(job.disk, job.step(STEP), manifest) and not damaged_files(
        job.disk, job.step(STEP), manifest
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_paused_save_does_not_change_a_step_sealed_by_another(tmp_path, world_size):
    winners = set()
    for at in range(1, calls_of(made, tmp_path, world_size=world_size) + 1):
        root, refused = made(tmp_path / f"{world_size}.{at}"), []
        job = Job.at(root)

        def meanwhile(job=job, refused=refused):
            try:
                save(job, "other", world_size=world_size, salt=100)
            except AlreadySealedError as error:
                refused.append(error)

        try:
            save(Job.at(root, disk=Pausing(at, meanwhile)), "paused", world_size=world_size)
        except AlreadySealedError as error:
            refused.append(error)
        assert len(refused) == 1, f"paused at call {at}: exactly one of the two is refused"
        assert is_whole(job), f"paused at call {at}"
        winners.add(read_manifest(job.disk, job.step(STEP)).attempt)
    assert winners == {"paused", "other"}


def part(job, rank, fence):
    """Write one rank's part of a step of two and return its writer."""
    writer = StepWriter(job, STEP, 2, "shared", ManualClock(), fence=fence)
    writer.begin()
    name = f"actor/model-{rank:05d}-of-00002.safetensors"
    writer.receipt(rank, [writer.write(name, shard_bytes({f"w{rank}": (64,)}), tensors=1)])
    return writer


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_writer_succeeds_wherever_the_other_of_its_attempt_seals(tmp_path, is_fenced):
    sealed, at, calls = set(), 0, 1
    while at < calls:
        at += 1
        root, fence = made(tmp_path / str(at)), str(made(tmp_path / f"fence-{at}")) if is_fenced else ""
        first = part(Job.at(root), 1, fence)
        disk = Pausing(at, lambda first=first: sealed.add(first.seal() is not None))
        second = part(Job.at(root, disk=disk), 2, fence)
        # Where the directory has left meanwhile, it finds no receipts: it looks again, as a rank that waits does.
        manifest = second.seal() or second.sealed()
        assert manifest is not None, f"paused at call {at}"
        assert manifest.attempt == "shared"
        assert is_whole(Job.at(root)), f"paused at call {at}"
        calls = disk.calls
    assert sealed == {False, True}


def test_a_replaced_trainer_neither_seals_nor_announces(tmp_path):
    def fenced(path):
        made(path / "fence")
        return path

    def options(root):
        return {"fence": f"{root}/fence", "announce": True}

    disk = Pausing(None, None)
    counted = fenced(tmp_path / "counted")
    save(Job.at(counted, disk=disk), "counted", **options(counted))
    for at in range(1, disk.calls + 1):
        root = fenced(tmp_path / f"at{at}")
        job = Job.at(root)

        def meanwhile(root=root, job=job):
            """A new trainer takes over, and writes this very step and a later one."""
            os.rename(f"{root}/fence", f"{root}/withdrawn")
            if os.path.isdir(job.step(STEP)):
                os.rename(job.step(STEP), f"{root}/vacated")
            save(job, "other", salt=100)
            write_step(job, STEP + 1)

        refused = None
        try:
            save(Job.at(root, disk=Pausing(at, meanwhile)), "paused", **options(root))
        except (AlreadySealedError, FencedError) as error:
            refused = error
        # The last call only makes durable what was announced before the other trainer came.
        assert (refused is not None) is (at < disk.calls), f"paused at call {at}"
        assert is_whole(job)
        assert read_manifest(job.disk, job.step(STEP)).attempt == "other"
        assert read_marker(job.disk, job.marker).step == STEP + 1, f"paused at call {at}"


@pytest.mark.parametrize("sealed_before", [False, True])
def test_a_replaced_client_neither_seals_nor_announces(tmp_path, sealed_before):
    job, fence = Job.at(made(tmp_path / "job")), made(tmp_path / "job/.syncd/term")
    with Client.open(job.root, "trainer", fence=str(fence), heartbeat=False) as client:
        writer = StepWriter(job, STEP, 1, "ranks")
        writer.begin()
        shard = writer.write("actor/model-00001-of-00001.safetensors", shard_bytes({"w": (64,)}), tensors=1)
        writer.receipt(1, [shard])
        if sealed_before:
            writer.seal()
        os.rename(fence, tmp_path / "withdrawn")
        with pytest.raises(FencedError, match="another trainer has taken over"):
            client.publish_received()
        os.rename(tmp_path / "withdrawn", fence)
    assert os.path.isdir(job.step(STEP)) is sealed_before
    assert read_marker(job.disk, job.marker).step is None


def test_a_save_with_a_removed_directory_raises_save_lost(tmp_path):
    job = Job.at(tmp_path)
    writer = StepWriter(job, STEP, 1, "slow", ManualClock())
    writer.begin()
    record = writer.write("actor/model-00001-of-00001.safetensors", shard_bytes({"w": (2,)}), tensors=1)
    os.rename(writer.path, tmp_path / "elsewhere")
    for act in (
        lambda: writer.write("actor/config.json", b"{}"),
        lambda: writer.receipt(1, [record]),
        writer.seal,
    ):
        with pytest.raises(SaveLostError, match="was removed while its writer was paused"):
            act()
    assert os.listdir(tmp_path) == ["elsewhere"]


def test_files_without_a_receipt_are_not_in_the_sealed_step(tmp_path):
    job = Job.at(tmp_path)
    writer = StepWriter(job, STEP, 1, "a", ManualClock())
    writer.begin()
    for name in ("adapter_config.json", "pytorch_model.bin", ".model-00001-of-00001.safetensors.0.tmp"):
        with open(f"{writer.path}/actor/{name}", "wb") as file:
            file.write(b"left by a crash")
    writer.receipt(
        1, [writer.write("actor/model-00001-of-00001.safetensors", shard_bytes({"w": (2,)}), tensors=1)]
    )
    assert writer.seal()
    assert sorted(os.listdir(f"{job.step(STEP)}/actor")) == [".receipts", "model-00001-of-00001.safetensors"]


def in_place(job):
    """Write a step in its own directory, without an attempt."""
    place = job.step(STEP)
    os.makedirs(f"{place}/actor")
    content = shard_bytes({"w": (2,)})
    with open(f"{place}/actor/model-00001-of-00001.safetensors", "wb") as file:
        file.write(content)
    from syncd.protocol.digest import digest_file
    from syncd.protocol.receipt import FileRecord

    name = "actor/model-00001-of-00001.safetensors"
    digest, size = digest_file(job.disk, f"{place}/{name}", "xxh3_128")
    receipt = Receipt(STEP, uuid.uuid4().hex, 1, 1, (FileRecord(name, size, digest, 1),))
    write_receipt(job.disk, place, receipt)
    job.disk.replace(f"{place}/manifest.json", encode_manifest(from_receipts([receipt])))


def test_a_step_that_was_written_in_place_is_published(tmp_path):
    job = Job.at(tmp_path)
    in_place(job)
    daemon, heard, _ = start(job)
    daemon.tick()
    assert [event["step"] for event in heard.of("version_published")] == [STEP]
    with pytest.raises(AlreadySealedError):
        save(job, "new")


def test_foreign_files_in_a_step_directory_are_kept_and_the_save_is_refused(tmp_path):
    job = Job.at(tmp_path)
    os.makedirs(f"{job.step(STEP)}/actor")
    with open(f"{job.step(STEP)}/actor/model_world_size_1_rank_0.pt", "wb"):
        pass
    with pytest.raises(UsageError, match="files that syncd did not write"):
        save(job, "new")
    assert os.listdir(f"{job.step(STEP)}/actor") == ["model_world_size_1_rank_0.pt"]


# --- the daemon ---------------------------------------------------------------------------------------------


def begun(job, attempt, step=STEP, size=10):
    writer = StepWriter(job, step, 2, attempt, ManualClock())
    writer.begin()
    writer.receipt(1, [writer.write("actor/model-00001-of-00002.safetensors", b"x" * size)])
    return writer


def attempts_in(job):
    return {name for name in os.listdir(job.root) if parse_attempt_name(name) is not None}


def test_an_attempt_is_shown_as_a_filling_step(tmp_path):
    job = Job.at(tmp_path)
    begun(job, "a")
    daemon, heard, _ = start(job)
    daemon.tick()
    step = daemon.snapshot.steps[STEP]
    assert (step.state, step.present, step.expected) == ("filling", 1, 2)
    assert heard.of("step_progressed")[0]["present"] == 1


def test_the_loser_of_a_race_for_a_step_is_removed(tmp_path):
    job = Job.at(tmp_path)
    loser = begun(job, "loser")
    daemon, heard, clock = start(job, trash_grace=0.0)
    daemon.tick()
    write_step(job, STEP)
    clock.at += 3
    daemon.tick()
    assert attempts_in(job) == set()
    assert [event["path"] for event in heard.of("attempt_pruned")] == [f".global_step_{STEP}.loser"]
    with pytest.raises(AlreadySealedError):
        loser.write("actor/config.json", b"{}")
    assert is_whole(job)


def test_of_two_attempts_the_stale_one_is_removed(tmp_path):
    """As where each start of a trainer ends in the midst of the same save."""
    job = Job.at(tmp_path)
    begun(job, "first")
    daemon, _, clock = start(job)
    daemon.tick()
    second = begun(job, "second")
    clock.at += 59
    daemon.tick()
    assert len(attempts_in(job)) == 2
    second.write("actor/config.json", b"{}")
    clock.at += 2
    daemon.tick()
    assert attempts_in(job) == {f".global_step_{STEP}.second"}


def test_a_single_attempt_is_kept_until_a_later_step_is_published(tmp_path):
    job = Job.at(tmp_path)
    begun(job, "alone")
    daemon, heard, clock = start(job, partial_grace=100.0)
    daemon.tick()
    clock.at += 10_000
    daemon.tick()
    assert attempts_in(job) == {f".global_step_{STEP}.alone"}
    write_step(job, STEP + 1)
    daemon.tick()
    clock.at += 200
    daemon.tick()
    assert attempts_in(job) == set()
    assert [event["rule"] for event in heard.of("step_pruned")] == ["stale_partial"]


def test_an_empty_attempt_is_removed(tmp_path):
    job = Job.at(tmp_path)
    os.mkdir(job.attempt(STEP, "empty"))
    daemon, heard, _ = start(job)
    write_step(job, STEP)
    daemon.tick()
    assert attempts_in(job) == set()
    assert [event["path"] for event in heard.of("attempt_pruned")] == [f".global_step_{STEP}.empty"]


def test_pruning_off_keeps_attempts(tmp_path):
    job = Job.at(tmp_path)
    begun(job, "loser")
    write_step(job, STEP)
    daemon, _, _ = start(job, prune=False)
    daemon.tick()
    assert len(attempts_in(job)) == 1


def test_a_step_sealed_below_the_published_one_is_kept_for_a_grace_period(tmp_path):
    """A trainer that goes back seals the step first; the seal itself wakes the daemon."""
    job = Job.at(tmp_path)
    for step in (STEP, STEP + 1, STEP + 2):
        write_step(job, step)
    daemon, heard, clock = start(job)
    daemon.tick()
    write_step(job, 1, announce=False)
    for _ in range(25):
        clock.at += 2
        daemon.tick()
    assert os.path.isdir(job.step(1)), heard.of("step_pruned")
    clock.at += 60
    daemon.tick()
    daemon.tick()
    assert not os.path.isdir(job.step(1))
