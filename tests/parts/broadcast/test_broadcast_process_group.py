"""How the group of a broadcast is made over NCCL and ended. A stand-in has torch's place: no GPU is here."""

import functools
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from syncd.client.wait import Deadline
from syncd.errors import TimedOutError
from syncd.parts.broadcast import group_calls, process_group
from syncd.parts.broadcast.group_calls import GroupError
from syncd.parts.broadcast.receive import _device_of
from syncd.protocol.backend import GLOO, NCCL, Gpu
from syncd.protocol.local_disk import SystemClock
from syncd.transports.files.export_walk import ExportWalk

LONG = 60.0
UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
GPU = torch.device("cuda", 3)


def within(seconds=LONG):
    return Deadline(SystemClock(), seconds)


class Work:
    def __init__(self, error=None):
        self._error = error

    def is_completed(self):
        return True

    def wait(self):
        if self._error is not None:
            raise self._error


class Group:
    """Notes what becomes of it. `stands` keeps its broadcast until it is set, as a member that has gone does."""

    def __init__(self, *, error=None, stands=None, frees=True):
        self.error, self.stands, self.frees = error, stands, frees
        self.buckets, self.options, self.aborts = [], [], threading.Semaphore(0)

    def broadcast(self, buckets, options):
        self.buckets += buckets
        self.options.append(options)
        if self.stands is not None:
            assert self.stands.wait(LONG)
        return Work(self.error)

    def abort(self):
        if self.stands is not None and self.frees:
            self.stands.set()
        self.aborts.release()

    def is_aborted(self, times=1):
        return all(self.aborts.acquire(timeout=LONG) for _ in range(times))


class Torch:
    """As much of torch as makes a group over NCCL."""

    uint8 = torch.uint8

    def __init__(self, group=None, refusal=None):
        self.calls, self.zeroed = [], []
        torch_ = self

        class ProcessGroupNCCL:
            class Options:
                _timeout = None

            def __new__(cls, store, rank, size, options):
                torch_.calls.append((store, rank, size, options._timeout, os.environ.get(UNWATCHED)))
                if refusal is not None:
                    raise refusal
                return group

        self.distributed = SimpleNamespace(
            ProcessGroupNCCL=ProcessGroupNCCL, BroadcastOptions=SimpleNamespace
        )

    def zeros(self, size, dtype, device):
        self.zeroed.append((size, dtype, device))
        return torch.zeros(size, dtype=dtype)


def assembled(*ranks):
    """Return a store in which members have said that they are here."""
    store = torch.distributed.HashStore()
    for rank in ranks:
        store.set(f"here/{rank}", "1")
    return store


@pytest.fixture
def made(monkeypatch):
    """Return what makes a group with a stand-in for torch."""
    return functools.partial(_made, monkeypatch)


def _made(monkeypatch, torch_, backend=NCCL, deadline=None, store=None):
    monkeypatch.setattr(process_group, "torch", torch_)
    monkeypatch.setattr(process_group, "DIST", torch_.distributed)
    return process_group.make_group(
        store or assembled(0, 1, 3),
        backend=backend,
        device=GPU,
        rank=2,
        world_size=4,
        address="127.0.0.1",
        deadline=deadline or within(),
    )


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_a_group_is_constructed_with_nccl_s_watchdog_off(monkeypatch, before, made):
    monkeypatch.delenv(UNWATCHED, raising=False)
    if before is not None:
        monkeypatch.setenv(UNWATCHED, before)
    group = Group()
    torch_ = Torch(group)
    offered = assembled(0, 1, 3)
    assert made(torch_, store=offered) is group
    [(store, rank, size, timeout, unwatched)] = torch_.calls
    assert store is offered
    assert (rank, size, unwatched) == (2, 4, "1")
    assert 0 < timeout.total_seconds() <= LONG
    assert os.environ.get(UNWATCHED) == before, "the trainer's own groups keep theirs"


def test_the_communicator_is_created_at_once_on_the_device_of_the_buckets(made):
    group = Group()
    torch_ = Torch(group)
    made(torch_)
    assert torch_.zeroed == [(1, torch.uint8, GPU)]
    assert [bucket.numel() for bucket in group.buckets] == [1]
    assert [options.rootRank for options in group.options] == [0]


def test_a_failed_constructor_restores_the_environment(monkeypatch, made):
    monkeypatch.delenv(UNWATCHED, raising=False)
    with pytest.raises(RuntimeError, match="no GPUs found"):
        made(Torch(refusal=RuntimeError("no GPUs found")))
    assert UNWATCHED not in os.environ


def test_nccl_without_support_in_torch_raises_group_error(made):
    torch_ = Torch()
    del torch_.distributed.ProcessGroupNCCL
    with pytest.raises(GroupError, match="nccl"):
        made(torch_)


def test_an_unknown_backend_raises_group_error(made):
    with pytest.raises(GroupError, match="carrier pigeon"):
        made(Torch(Group()), backend="carrier pigeon")


def test_a_failed_first_broadcast_is_reported_and_aborts_the_group(made):
    group = Group(error=RuntimeError("NCCL error: remote process exited"))
    with pytest.raises(GroupError, match="remote process exited"):
        made(Torch(group))
    assert group.is_aborted()


def test_nccl_starts_only_after_all_members_arrived(made):
    group = Group()
    with pytest.raises(GroupError, match="not all members came"):
        made(Torch(group), deadline=within(0.2), store=assembled(0, 3))
    assert group.is_aborted()
    assert group.buckets == []


def test_members_that_do_not_connect_time_out_at_the_deadline(made):
    """The call stands in NCCL, which abort frees."""
    group = Group(stands=threading.Event())
    with pytest.raises(TimedOutError):
        made(Torch(group), deadline=within(0.2))
    assert group.is_aborted()


def test_a_communicator_that_returns_after_the_deadline_is_aborted_again(made):
    """The call stands where abort does not reach it, and returns later."""
    group = Group(stands=threading.Event(), frees=False)
    with pytest.raises(TimedOutError):
        made(Torch(group), deadline=within(0.2))
    assert group.is_aborted()
    assert not group.aborts.acquire(blocking=False)
    group.stands.set()
    assert group.is_aborted()


def test_a_thread_that_the_device_blocks_is_freed_after_the_deadline(monkeypatch):
    monkeypatch.setattr(group_calls, "_GRACE", 0.1)
    group = Group(stands=threading.Event())
    with pytest.raises(TimedOutError), group_calls.aborted_at(group, within(0.1)):
        assert group.stands.wait(LONG), "freed by abort"
    assert group.is_aborted()


def test_a_group_that_finishes_in_time_is_not_aborted():
    group, before = Group(), threading.enumerate()
    with group_calls.aborted_at(group, within()):
        [timer] = [thread for thread in threading.enumerate() if thread not in before]
    assert timer.finished.is_set()
    timer.join(LONG)
    assert not group.aborts.acquire(blocking=False)


class Memory:
    """Stands for a bucket: something that can be seen to go."""


def test_buffers_in_flight_are_kept_until_the_group_has_ended():
    ending, kept = threading.Event(), Memory()
    gone = threading.Event()
    weakref.finalize(kept, gone.set)
    group = SimpleNamespace(abort=lambda: ending.wait(LONG))
    thread = group_calls.abort([group], kept)
    del kept
    assert not gone.is_set()
    ending.set()
    thread.join(LONG)
    del thread
    assert gone.wait(LONG)


def test_a_process_waits_for_its_groups_to_end_but_only_for_a_bounded_time(monkeypatch):
    ending, ended = threading.Event(), []
    group = SimpleNamespace(abort=lambda: ended.append(ending.wait(LONG)))
    thread = group_calls.abort([group])
    monkeypatch.setattr(group_calls, "_ENDING", 0.1)
    group_calls._await_endings()
    assert ended == [], "it stands, and was given up"
    monkeypatch.setattr(group_calls, "_ENDING", LONG)
    ending.set()
    group_calls._await_endings()
    assert ended == [True]
    assert not thread.is_alive()


def test_aborting_no_group_does_nothing():
    assert group_calls.abort([None]) is None


def properties(uuid="GPU-0a"):
    return lambda device: SimpleNamespace(uuid=uuid)


def with_gpu(found=None, version=lambda: (2, 27, 5), *, has_nccl=True):
    cuda = SimpleNamespace(get_device_properties=found or properties(), nccl=SimpleNamespace(version=version))
    return SimpleNamespace(cuda=cuda, distributed=SimpleNamespace(is_nccl_available=lambda: has_nccl))


def raising(error):
    def call(*_):
        raise error

    return call


def gpu_told_by(monkeypatch, torch_, device):
    monkeypatch.setattr(process_group, "torch", torch_)
    return process_group.gpu_of(device)


def test_a_gpu_is_reported_by_its_uuid_and_nccl_version(monkeypatch):
    assert gpu_told_by(monkeypatch, with_gpu(), GPU) == Gpu("GPU-0a", "2.27.5")


@pytest.mark.parametrize(
    ("torch_", "device"),
    [
        (torch, torch.device("cpu")),
        (with_gpu(), torch.device("cpu")),
        (with_gpu(has_nccl=False), GPU),
        (with_gpu(found=raising(RuntimeError("no driver"))), GPU),
        (with_gpu(found=lambda device: SimpleNamespace()), GPU),
        (with_gpu(version=raising(AttributeError("_nccl_version"))), GPU),
    ],
)
def test_no_gpu_is_reported_if_nccl_cannot_be_used(monkeypatch, torch_, device):
    assert gpu_told_by(monkeypatch, torch_, device) is None


def test_an_explorer_offers_nccl_only_if_all_parameters_are_on_one_device():
    meta, here = torch.zeros(2, device="meta"), torch.zeros(2)
    assert _device_of({"a": meta, "b": meta}).type == "meta"
    assert _device_of({"a": meta, "b": here}).type == "cpu"
    assert _device_of({}).type == "cpu"


def test_the_trainer_s_device_is_that_of_its_largest_tensor():
    walk = ExportWalk(
        [("a", torch.zeros(2)), ("b", torch.zeros(9, device="meta")), ("c", torch.zeros(3))], 0, 1, None
    )
    walk.plan()
    assert walk.device.type == "meta"


def test_a_gloo_group_broadcasts_without_a_gpu(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    group = process_group.make_group(
        store,
        backend=GLOO,
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        address="127.0.0.1",
        deadline=within(),
    )
    bucket = torch.arange(8, dtype=torch.uint8)
    work = process_group.start_broadcast(group, bucket, within())
    group_calls.finish_broadcast(work, within(), "not sent")
    assert bucket.tolist() == list(range(8))
