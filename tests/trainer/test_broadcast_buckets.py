"""What a broadcast sends: the tensors of the export cut into buckets, as the plan says."""

import pytest
import torch

from syncd.errors import CorruptDataError
from syncd.protocol.buckets import plan_buckets
from syncd.transports.broadcast.packing import Packer
from syncd.transports.filesystem.export_walk import ExportWalk

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


def poured(plan, state, dtype=None):
    """Return all bytes that are sent, in one piece."""
    buckets = Packer(check_finite=False).buckets(plan, walked(state, dtype), torch.device("cpu"))
    return torch.cat([bucket.clone() for bucket in buckets])


@pytest.mark.parametrize("bucket", [16, 32, 48, 100, 160, 4096])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_tensor_is_packed_at_its_slot_in_the_right_dtype(bucket, dtype):
    plan = planned(STATE, bucket, dtype)
    memory = poured(plan, STATE, dtype)
    assert memory.numel() == plan.total
    for place in plan.slots:
        wanted = STATE[place.name]
        if wanted.is_floating_point() and dtype is not None:
            wanted = wanted.to(dtype)
        found = memory[place.start : place.end].clone().view(wanted.dtype).view(place.shape)
        assert torch.equal(found, wanted)


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
        poured(planned(STATE, 64), changed)
