"""What a trainer packs where the buckets are on a device: one in main memory stands for it."""

import pytest
import torch

from syncd.errors import NonFiniteError
from syncd.parts.broadcast.packing import Packer
from syncd.parts.broadcast.process_group import CPU
from syncd.protocol.buckets import plan_buckets
from syncd.transports import torch_tensors
from syncd.transports.files.export_walk import ExportWalk
from syncd.transports.torch_tensors import DeviceFiniteCheck, check_finite, is_finite

FLOATS = sorted(torch_tensors._EXPONENT, key=str)
BAD = [float("nan"), -float("nan"), float("inf"), -float("inf")]


class OnDevice(torch.Tensor):
    """A tensor that says that it is not in main memory."""

    is_cpu = False


def content(dtype, values):
    return torch.tensor(values, dtype=torch.float32).to(dtype).view(torch.uint8)


def is_refused(content, dtype):
    try:
        check_finite("w", content, dtype)
    except NonFiniteError:
        return True
    return False


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -448.0, 3e38, *BAD])
def test_a_device_refuses_the_same_values_as_main_memory(dtype, value):
    found = content(dtype, [1.0, value, -1.0])
    assert bool(is_finite(found, dtype)) is not is_refused(found, dtype)


def test_non_finite_values_on_a_device_are_reported_at_the_end_by_name():
    looked = DeviceFiniteCheck()
    for name, values in (("a", [1.0]), ("b", [float("inf")]), ("c", [float("nan")])):
        looked.check(name, content(torch.float32, values).as_subclass(OnDevice), torch.float32)
    looked.check("d", torch.zeros(8, dtype=torch.uint8).as_subclass(OnDevice), torch.int64)
    with pytest.raises(NonFiniteError, match="'b'"):
        looked.require()
    looked.require()


def test_non_finite_values_in_main_memory_are_refused_at_once():
    with pytest.raises(NonFiniteError, match="'a'"):
        DeviceFiniteCheck().check("a", content(torch.float32, [float("nan")]), torch.float32)


def walked(value=1.0):
    return ExportWalk([(f"a{n}", torch.full((3,), value)) for n in range(4)], 0, 1, None)


def planned():
    walk = walked()
    walk.plan()
    return plan_buckets([spec[:3] for spec in walk.specs], 32)


def test_memory_of_small_tensors_is_reused_and_reallocated_after_a_failure():
    packer, plan = Packer(check_finite=True), planned()
    places = [[bucket.data_ptr() for bucket in packer.buckets(plan, walked(), CPU)] for _ in range(2)]
    assert len(set(places[0])) == len(places[0]) == 2
    assert set(places[0]) == set(places[1])
    kept = list(packer._buffers)
    packer.drop()
    again = {bucket.data_ptr() for bucket in packer.buckets(plan, walked(), CPU)}
    assert again.isdisjoint(buffer.data_ptr() for buffer in kept)


@pytest.mark.parametrize("check", [True, False])
def test_non_finite_values_are_refused_only_if_checked(check):
    packer = Packer(check_finite=check)
    buckets = packer.buckets(planned(), walked(float("nan")), CPU)
    if check:
        with pytest.raises(NonFiniteError, match="'a0'"):
            list(buckets)
    else:
        assert len(list(buckets)) == 2
