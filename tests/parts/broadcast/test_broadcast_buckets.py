"""What a broadcast sends: the tensors of the export cut into buckets, as the plan says."""

import itertools

import pytest
import torch

from syncd.errors import CorruptDataError
from syncd.parts.broadcast.packing import Packer
from syncd.parts.broadcast.process_group import CPU
from syncd.protocol.buckets import LARGE, plan_buckets
from syncd.transports.files.export_walk import ExportWalk

STATE = {
    "a": torch.arange(30, dtype=torch.float32).reshape(5, 6),
    "none": torch.zeros(0),
    "b": torch.arange(7, dtype=torch.int8),
    "c": torch.arange(40, dtype=torch.float32).reshape(8, 5).T,
    "d": torch.tensor(3.0),
}


def walked(state, dtype=None):
    return ExportWalk(list(state.items()), 0, 1, dtype)


def planned(state, bucket, dtype=None):
    walk = walked(state, dtype)
    walk.plan()
    return plan_buckets([spec[:3] for spec in walk.specs], bucket)


def poured(plan, walk):
    """Return what a receiver holds: its memory, with each bucket where the plan has it; other bytes are 255."""
    memory = torch.full((plan.total,), 255, dtype=torch.uint8)
    buckets = list(plan.buckets())
    for number, bucket in enumerate(Packer(check_finite=False).buckets(plan, walk, CPU)):
        start, end = buckets[number]
        memory[start:end].copy_(bucket)
    assert number + 1 == len(buckets)
    return memory


def found_in(memory, slot, dtype):
    return memory[slot.start : slot.end].clone().view(dtype).view(slot.shape)


@pytest.mark.parametrize("bucket", [16, 32, 48, 100, 160, 4096])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_tensor_is_sent_at_its_slot_in_the_right_dtype(bucket, dtype):
    plan = planned(STATE, bucket, dtype)
    memory = poured(plan, walked(STATE, dtype))
    for slot in plan.slots:
        wanted = STATE[slot.name]
        if wanted.is_floating_point() and dtype is not None:
            wanted = wanted.to(dtype)
        assert torch.equal(found_in(memory, slot, wanted.dtype), wanted)


@pytest.mark.parametrize("bucket", [16, 48, 100, 4096, 3 << 20])
def test_a_bucket_is_no_longer_than_allowed_and_holds_one_large_tensor_or_small_ones(bucket):
    sizes = [LARGE // 4 - 1, 5, LARGE // 4, LARGE // 2, 3, 0, LARGE // 4 + 7]
    plan = plan_buckets([(f"t{n}", "F32", (size,)) for n, size in enumerate(sizes)], bucket)
    runs, buckets = list(plan.runs()), list(plan.buckets())
    assert [slot for run in runs for slot in run] == [slot for slot in plan.slots if slot.end > slot.start]
    for start, end in buckets:
        assert 0 < end - start <= plan.bucket == -(-bucket // 16) * 16
        assert start % 16 == 0
    for run in runs:
        assert len(run) == 1 or not any(map(plan.is_large, run))
    for before, after in itertools.pairwise(runs):
        if not plan.is_large(before[0]) and not plan.is_large(after[0]):
            assert after[0].end - before[0].start > plan.bucket, "these would fit into one bucket"
    covered = [at for start, end in buckets for at in (start, end)]
    assert covered == sorted(covered)


def test_a_large_tensor_is_sent_from_its_own_memory_unless_the_export_may_reuse_that():
    large = torch.arange(LARGE, dtype=torch.uint8).view(torch.int32)
    small = torch.ones(3)
    state = {"large": large, "small": small, "cast": large.float()}
    plan = planned(state, LARGE // 2)
    inside = range(large.data_ptr(), large.data_ptr() + large.nbytes)
    held = [
        bucket.data_ptr() in inside for bucket in Packer(check_finite=True).buckets(plan, walked(state), CPU)
    ]
    assert held == [True, True, False, False, False]

    def one_by_one():
        memory = torch.empty(LARGE // 4, dtype=torch.int32)
        for name, value in (("a", 1), ("b", 2)):
            yield name, memory.fill_(value)

    walk = ExportWalk(one_by_one, 0, 1, None)
    walk.plan()
    plan = plan_buckets([spec[:3] for spec in walk.specs], LARGE)
    first, second = Packer(check_finite=True).buckets(plan, ExportWalk(one_by_one, 0, 1, None), CPU)
    assert set(first.view(torch.int32).tolist()) == {1}, "the first bucket was sent while the second was made"
    assert set(second.view(torch.int32).tolist()) == {2}


def test_another_way_of_cutting_has_another_digest(monkeypatch):
    tensors = [("a", "F32", (4,))]
    before = plan_buckets(tensors, 64).digest
    monkeypatch.setattr("syncd.protocol.buckets._LAYOUT", "another")
    assert plan_buckets(tensors, 64).digest != before


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("d"),
        lambda state: state.update(e=torch.zeros(3)),
        lambda state: state.update(a=torch.zeros(6, 5)),
        lambda state: state.update(b=torch.zeros(7, dtype=torch.uint8)),
    ],
)
def test_a_changed_export_is_refused(change):
    changed = dict(STATE)
    change(changed)
    with pytest.raises(CorruptDataError, match="the export has changed at tensor"):
        poured(planned(STATE, 64), walked(changed))
