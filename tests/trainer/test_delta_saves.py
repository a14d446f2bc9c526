"""Steps that the trainer stores as deltas are, bit for bit, what whole saves of the same weights are."""

import contextlib
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
from safetensors.torch import load_file  # noqa: E402

pytest.importorskip("pyarrow", reason="deltas need pyarrow")

from structlog.testing import capture_logs  # noqa: E402
from support.delta_saves import FILES, DeltaTrainer, Weights, assert_same, explorer, form_of  # noqa: E402
from support.deltas import contents  # noqa: E402
from support.jobs import steps_of  # noqa: E402
from support.launching import until  # noqa: E402
from support.paths import TESTS  # noqa: E402
from support.whole_jobs import run_ranks  # noqa: E402

from syncd.errors import StorageError  # noqa: E402
from syncd.extras import install_command  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.manifest import read_manifest  # noqa: E402
from syncd.protocol.presence import READS_DELTA, RunningStatus, path_of, read_presence  # noqa: E402
from syncd.protocol.request import Pin, Request, remove_pin, write_pin, write_request  # noqa: E402
from syncd.protocol.version import write_marker  # noqa: E402
from syncd.protocol.writer import StepWriter  # noqa: E402
from syncd.transports.base import StepContent  # noqa: E402
from syncd.transports.files.memory_copy import MemoryCopy  # noqa: E402
from syncd.transports.host_memory import HostMemory  # noqa: E402
from syncd.transports.measured import AGAIN  # noqa: E402
from trainer.checkpoints import begin_training, complete, latest_hf_directory  # noqa: E402


@pytest.fixture
def trainer(tmp_path):
    """Return a trainer of one rank, at most three deltas after a keyframe."""
    made = DeltaTrainer(str(tmp_path), sync={"keyframe_every": 3})
    yield made
    made.close()


def test_a_run_of_steps_is_bit_for_bit_that_of_whole_saves(trainer, tmp_path):
    weights, job = Weights(), trainer.job
    trainer.sender.prepare(weights.tensors.items())
    with capture_logs() as logs:
        trainer.store(1, weights.tensors.items)
        begins = [trainer.sender.sent.begins_deltas]
        explorer(job, "reader", READS_DELTA)
        for step in range(2, 10):
            trainer.store(step, weights.train().tensors.items)
            begins.append(trainer.sender.sent.begins_deltas)
    forms = [form_of(job, step) for step in range(1, 10)]
    assert forms == ["whole", "whole", "shortcut", "delta", "delta", "delta", "shortcut", "delta", "delta"]
    assert begins == [False, True, True, False, False, False, True, False, False]
    for step in range(1, 10):
        assert_same(str(tmp_path), step, str(tmp_path))
    reasons = [log["why"] for log in logs if log["event"] == "storage_chosen"]
    assert reasons == [
        "no living explorer reads deltas",
        "no step was sealed since this trainer started",
        "the share of changes is not known yet",
        "every explorer reads deltas",
        "3 deltas follow step 3 already",
        "every explorer reads deltas",
    ]


@pytest.mark.fault("the shards of a fused FP8 weight damage each other")
def test_fp8_weights_and_their_scales_are_bit_for_bit_those_of_whole_saves(tmp_path):
    """A step of bytes is stored as such: nothing is cast, and the scales change with the weights."""
    trainer = DeltaTrainer(str(tmp_path), sync={"dtype": "keep"})
    tensors = {name: torch.randn(256, 1024).to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    tensors |= {f"{name}_scale": torch.rand(256) for name in ("q", "k", "v")}
    explorer(trainer.job, "reader", READS_DELTA)
    for step in range(1, 6):
        trainer.store(step, tensors.items)
        made = assert_same(str(tmp_path), step, str(tmp_path))
        assert form_of(trainer.job, step) == ("whole", "shortcut", "delta", "delta", "delta")[step - 1]
        if made.kind == "delta":
            assert made.size < sum(shard.size for shard in made.whole_shards) / 8
        (shard,) = Path(trainer.plain_job.step(step), "actor").glob("*.safetensors")
        stored = load_file(shard)
        assert all(
            torch.equal(stored[name].view(torch.uint8), one.view(torch.uint8))
            for name, one in tensors.items()
        )
        for name in ("q", "k", "v"):
            bits = tensors[name].view(torch.uint8)
            bits[torch.rand(bits.shape) < 0.02] ^= 1
            tensors[f"{name}_scale"][step] *= 1.5
    trainer.close()


def test_a_presence_that_cannot_be_read_does_not_end_deltas(trainer, tmp_path):
    weights, job = Weights(), trainer.job
    explorer(job, "reader", READS_DELTA)
    path = Path(path_of(job.explorers, "reader"))
    for step in range(1, 6):
        there = path.read_bytes()
        path.write_bytes(b"{" if step == 4 else there)
        trainer.store(step, weights.train().tensors.items)
        path.write_bytes(there)
        assert_same(str(tmp_path), step, str(tmp_path))
    assert [form_of(job, step) for step in range(1, 6)] == ["whole", "shortcut", "delta", "whole", "delta"]


@pytest.mark.fault("the trainer's base is ahead of a save that failed")
@pytest.mark.fault("a delta of dense changes is larger than the step")
def test_every_other_reason_for_a_whole_step(trainer, tmp_path, monkeypatch):
    weights, job, reader = Weights(), trainer.job, explorer(trainer.job, "reader", READS_DELTA)

    def stored(step, **more):
        trainer.store(step, weights.train().tensors.items, **more)
        assert_same(str(tmp_path), step, str(tmp_path))
        return form_of(job, step)

    assert [stored(step) for step in (1, 2, 3)] == ["whole", "shortcut", "delta"]
    assert stored(4, must_be_whole="it is a full checkpoint") == "shortcut"
    assert stored(5) == "delta"

    other = explorer(job, "other")  # it says nothing of deltas
    assert stored(6) == "shortcut"
    other.update(status=RunningStatus.STOPPED)
    assert stored(7) == "delta"

    # A save that fails between encoding and the seal: the next step is of the last one that was sealed.
    with monkeypatch.context() as broken:
        broken.setattr(StepWriter, "seal", refuse)
        trainer.sender.send(8, "refused", StepContent(weights.train().tensors.items))
        with pytest.raises(StorageError):
            trainer.sender.wait()
    assert not os.path.exists(job.step(8))
    assert stored(9) == "shortcut"
    assert read_manifest(job.disk, job.step(9)).shortcut.parent == 7
    assert stored(10) == "delta"

    # Somebody removed the parent, and later wrote it again.
    shutil.rmtree(job.step(10))
    assert stored(11) == "whole"
    assert [stored(step) for step in (12, 13)] == ["delta", "delta"]

    # Dense changes: the delta that shows it is a step like others, the next ones are whole.
    weights.tensors["embed"].normal_()
    weights.tensors["layer"].normal_()
    assert [stored(step) for step in (14, 15)] == ["delta", "whole"]

    # Other tensors.
    weights.tensors["more"] = torch.ones(5)
    assert stored(16) == "whole"

    # A copy in memory has the files of a whole step.
    os.makedirs(tmp_path / "copy" / "actor" / ".receipts")
    assert stored(17, copy=MemoryCopy(str(tmp_path / "copy"), 17, "copied", 1, pytest.fail)) == "whole"
    name = "model-00001-of-00001.safetensors"
    assert contents(tmp_path / "copy/actor")[name] == contents(f"{job.step(17)}/actor")[name]

    # Nobody reads deltas any more: no memory is kept for them.
    used = trainer.memory.used
    reader.update(status=RunningStatus.STOPPED)
    assert stored(18) == "whole"
    assert trainer.memory.used <= used // 2


def refuse(*_, **__):
    raise StorageError("refused by the test")


@pytest.mark.fault("a step is pruned while it is read")
def test_the_parent_of_a_delta_that_is_being_written_stays(tmp_path, monkeypatch):
    trainer, weights, seen = DeltaTrainer(str(tmp_path), keep_last=1), Weights(), []
    job, daemon = trainer.job, trainer.daemon
    explorer(job, "reader", READS_DELTA)
    for step in (1, 2, 3):
        trainer.store(step, weights.train().tensors.items, must_be_whole="" if step == 3 else "as a base")
        write_pin(job, Pin(step, "test"))

    def write(self, name, *given, **more):
        if "delta-" in name:
            roll_back_twice()
            me = read_presence(job.disk, path_of(job.trainers, "trainer"))
            seen.append((steps_of(job), me.leases))
        return original(self, name, *given, **more)

    def roll_back_twice():
        """Have nothing else keep step 3: it is neither the version nor the one before, and the marker is ahead."""
        for step in (2, 1):
            write_request(job, Request("rollback", step))
            daemon.tick(woken=True)
            assert daemon.snapshot.version.step == step
        remove_pin(job, 3)
        write_marker(job.disk, job.marker, 4)
        trainer.clock.at += 10
        daemon.tick(woken=True)

    original = StepWriter.write
    monkeypatch.setattr(StepWriter, "write", write)
    trainer.store(4, weights.train().tensors.items)
    assert form_of(job, 4) == "delta"
    assert seen == [([1, 2, 3], (3,))]
    assert_same(str(tmp_path), 4, str(tmp_path))
    assert trainer.client.own("trainer", "a lease").presence.leases == ()
    trainer.close()


def test_the_job_is_read_while_weights_are_copied(trainer, tmp_path):
    weights, job = Weights(), trainer.job
    explorer(job, "reader", READS_DELTA)
    for step in (1, 2, 3):
        trainer.store(step, weights.train().tensors.items)

    def leases():
        return read_presence(job.disk, path_of(job.trainers, "trainer")).leases

    def copied():
        yield from weights.tensors.items()
        until(lambda: 3 in leases())

    assert 3 not in leases()
    weights.train()
    trainer.store_whole(4, weights.tensors.items)
    trainer.store_changes(4, copied)
    assert form_of(job, 4) == "delta"
    assert_same(str(tmp_path), 4, str(tmp_path))


def test_a_save_need_not_wait_for_the_one_before(trainer, tmp_path):
    weights, job = Weights(), trainer.job
    explorer(job, "reader", READS_DELTA)
    for step in (1, 2, 3):
        trainer.store(step, weights.train().tensors.items)
    for step in (4, 5):
        weights.train()
        trainer.store_whole(step, weights.tensors.items)
        trainer.sender.send(step, f"attempt-{step}", StepContent(weights.tensors.items, FILES))
    trainer.sender.wait()
    for step in (4, 5):
        assert form_of(job, step) == "delta"
        assert_same(str(tmp_path), step, str(tmp_path))


def test_changes_for_which_the_host_has_no_room_fail_one_save_and_are_tried_again_later(
    tmp_path, monkeypatch
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights, last = Weights(), 2 + AGAIN
    with contextlib.closing(DeltaTrainer(str(tmp_path), sync={"delta": "auto"})) as trainer:
        explorer(trainer.job, "reader", READS_DELTA)
        trainer.store(1, weights.tensors.items)
        with monkeypatch.context() as host:
            host.setattr("syncd.transports.delta.container.STREAMS_IN_MEMORY", 1)
            host.setattr("tempfile.TemporaryFile", full)
            with pytest.raises(StorageError, match="no temporary file"):
                trainer.store(2, weights.train().tensors.items)
            with capture_logs() as logs:
                trainer.store(3, weights.train().tensors.items)
        assert "no temporary file" in logs[0]["why"]
        for step in range(4, last + 2):
            trainer.store(step, weights.train().tensors.items)
        forms = [form_of(trainer.job, step) for step in range(3, last + 2)]
    assert forms == ["whole"] * AGAIN + ["shortcut"]


def test_deltas_wait_for_a_daemon_that_publishes_them(trainer, tmp_path):
    weights, job = Weights(), trainer.job
    explorer(job, "reader", READS_DELTA)
    daemon, trainer.daemon = trainer.daemon, None
    for step in range(1, 5):
        trainer.store(step, weights.train().tensors.items)
    assert [form_of(job, step) for step in range(1, 5)] == ["whole", "shortcut", "shortcut", "shortcut"]
    trainer.daemon = daemon
    daemon.tick()
    trainer.store(5, weights.train().tensors.items)
    assert form_of(job, 5) == "delta"
    assert_same(str(tmp_path), 5, str(tmp_path))


@pytest.mark.parametrize(
    ("sync", "limit"), [({"delta": "off"}, 1 << 40), ({"mode": "stream"}, 1 << 40), ({}, 24 << 20)]
)
def test_without_deltas_or_memory_for_them_all_steps_are_whole(tmp_path, sync, limit):
    trainer, weights = DeltaTrainer(str(tmp_path), sync=sync, memory=HostMemory(limit)), Weights()
    explorer(trainer.job, "reader", READS_DELTA)
    with capture_logs() as logs:
        trainer.sender.prepare(weights.tensors.items)
        for step in (1, 2, 3):
            trainer.store(step, weights.train().tensors.items)
    assert {form_of(trainer.job, step) for step in (1, 2, 3)} == {"whole"}
    assert trainer.memory.used <= limit
    reasons = [log["why"] for log in logs if log["event"] == "storage_chosen"]
    assert [why for why in reasons if "no room for the weights of the step before" in why] or sync
    trainer.close()


def test_an_explorer_without_a_stage_is_named_once_with_the_key_that_gives_it_one(trainer):
    with capture_logs() as logs:
        trainer.store(1, Weights().tensors.items)
        explorer(trainer.job, "e0")
        for step in (2, 3):
            trainer.store(step, Weights().tensors.items)
    found = [(log["step"], "explorer.follow" in log.get("hint", "")) for log in logs if "form" in log]
    assert found == [(1, False), (2, True)]


def test_missing_packages_are_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("syncd.extras.find_spec", lambda name: None if name == "pyarrow" else name)
    with capture_logs() as logs:
        trainer = DeltaTrainer(str(tmp_path))
    assert [(log["reason"], log["hint"]) for log in logs if log["event"] == "deltas_disabled"] == [
        ("not installed: pyarrow", install_command("delta"))
    ]
    explorer(trainer.job, "reader", READS_DELTA)
    for step in (1, 2, 3):
        trainer.store(step, Weights().tensors.items)
    assert form_of(trainer.job, 3) == "whole"
    trainer.close()


def test_a_full_checkpoint_of_a_delta_has_a_whole_directory(trainer, tmp_path):
    """A run may be stopped at a step whose weights are published as a delta already."""
    weights, job = Weights(), trainer.job
    explorer(job, "reader", READS_DELTA)
    for step in (1, 2, 3):
        trainer.store(step, weights.train().tensors.items)
    assert form_of(job, 3) == "delta"
    begin_training(job, "save")
    complete(job, 3, {"protocol": 1, "step": 3}, save="save")
    assert latest_hf_directory(job) == f"{job.step(3)}/actor/huggingface"
    found, whole = contents(latest_hf_directory(job)), contents(f"{trainer.plain_job.step(3)}/actor")
    assert found == {name: data for name, data in whole.items() if not name.startswith(".")}
    trainer.daemon.tick()
    trainer.store(4, weights.train().tensors.items)
    assert_same(str(tmp_path), 4, str(tmp_path))


@pytest.mark.slow
@pytest.mark.fault("a resume breaks the base of the next delta")
def test_two_ranks_fail_are_killed_and_go_on_as_one(tmp_path):
    """Real ranks with FSDP2; the next start has another world size."""
    codes, said = run_ranks(tmp_path, 2, f"{TESTS}/trainer/programs/delta_save.py", tmp_path)
    assert codes[1] == -signal.SIGKILL
    job = Job.at(tmp_path / "job")
    forms = [form_of(job, step) for step in (1, 2, 3, 4, 5, 7)]
    assert forms == ["whole", "shortcut", "delta", "delta", "delta", "shortcut"], said
    assert len(read_manifest(job.disk, job.step(5)).shards) == 2
    assert read_manifest(job.disk, job.step(7)).shortcut.parent == 5
    assert not os.path.exists(job.step(6))
    assert not os.path.exists(job.step(8))
    for step in (3, 5, 7):
        assert_same(str(tmp_path), step, str(tmp_path))

    trainer, weights = DeltaTrainer(str(tmp_path)), Weights()
    explorer(job, "reader", READS_DELTA)
    for step in (9, 10, 11):
        trainer.store(step, weights.train().tensors.items)
        assert_same(str(tmp_path), step, str(tmp_path))
    assert [form_of(job, step) for step in (9, 10, 11)] == ["whole", "shortcut", "delta"]
    trainer.close()
