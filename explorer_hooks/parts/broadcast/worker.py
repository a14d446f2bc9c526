"""A worker's end of a push: where the tensors of a bucket come from.

This module needs nothing but torch, because workers of an engine use it in their own environment. It reads no pickle.
"""

import contextlib
import os
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from explorer_hooks.parts.broadcast.segments import open_segment

_DIST: Any = torch.distributed
_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
"""If it is set, a group over NCCL has no watchdog, and waits end at their time-out."""


@dataclass(kw_only=True)
class Bucket:
    names: list[str]
    dtypes: list[str]  # as torch names them
    shapes: list[list[int]]
    segment: str = ""  # the segment of shared memory that they are in, if they are in one
    offsets: list[int] = field(default_factory=list)  # where each begins in it, in bytes
    gpu: str = ""  # the UUID of the GPU that they are on, if they come as handles
    # For each worker, CUDA's handle of each tensor.
    handles: list[list[dict[str, Any]]] = field(default_factory=list)


class Source(Protocol):
    """Where the tensors of a bucket come from."""

    def tensors(self, bucket: Bucket, worker: int) -> list[torch.Tensor]:
        """Return the tensors of a bucket for a worker."""

    def keep_apart(self, model: torch.nn.Module) -> None:
        """Have no parameter of a model use memory of the sender, which the next version may overwrite."""

    def close(self) -> None:
        """End it."""


@dataclass(kw_only=True)
class Meeting:
    address: str  # the address on which its store listens
    port: int
    secret: str  # the prefix of its keys
    world_size: int  # the workers of this engine, and the sender
    timeout: float  # seconds that one version may take
    backend: str = "gloo"  # gloo or nccl

    def open(self, worker: int, device: torch.device) -> Source:
        return Group(self, worker, device)


@dataclass(kw_only=True)
class Place:
    """What the sender shares with the workers."""

    segment: str = ""  # a segment of shared memory, if the tensors are in main memory
    gpu: str = ""  # the UUID of the GPU that they are on, else

    def open(self, worker: int, device: torch.device) -> Source:
        """Make sure that this worker sees it."""
        del worker, device
        if self.segment:
            try:
                open_segment(self.segment)
            except OSError as error:
                raise RuntimeError(f"this worker does not see the sender's memory: {error}") from error
        else:
            _device_of(self.gpu)
        return SharedMemory()


class Group:
    """One worker's end of a group; workers are counted over all of them."""

    def __init__(self, info: Meeting, worker: int, device: torch.device) -> None:
        self._end = time.monotonic() + info.timeout
        reached = _DIST.TCPStore(
            info.address,
            info.port,
            None,
            is_master=False,
            timeout=self._left(),
            wait_for_workers=False,
        )
        store = _DIST.PrefixStore(info.secret, reached)
        over_nccl = info.backend == "nccl"
        self._device = device if over_nccl else torch.device("cpu")
        connect = self._over_nccl if over_nccl else self._over_gloo
        self._group = connect(store, worker + 1, info)

    def _over_gloo(self, store: Any, rank: int, info: Meeting) -> Any:
        options = _DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - nothing else sets the address to listen on
        options._timeout = self._left()  # noqa: SLF001
        options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=info.address)]  # noqa: SLF001
        return _DIST.ProcessGroupGloo(store, rank, info.world_size, options)

    def _over_nccl(self, store: Any, rank: int, info: Meeting) -> Any:
        """Return a group in which all members have met, as `make_group` of the sender expects it."""
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = self._left()  # noqa: SLF001
        with _unwatched():
            group = _DIST.ProcessGroupNCCL(store, rank, info.world_size, options)
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{member}" for member in range(info.world_size)], self._left())
        met = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._broadcast(group, met).wait(self._left())
        return group

    def tensors(self, bucket: Bucket, worker: int) -> list[torch.Tensor]:
        del worker
        made = [
            torch.empty(shape, dtype=_dtype(name), device=self._device)
            for name, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
        ]
        for work in [self._broadcast(self._group, tensor) for tensor in made]:
            work.wait(self._left())
        return made

    def keep_apart(self, model: torch.nn.Module) -> None:
        """Do nothing: what was received is this worker's own."""

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _broadcast(self, group: Any, tensor: torch.Tensor) -> Any:
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._left()
        return group.broadcast([tensor], options)

    def _left(self) -> timedelta:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the update did not finish in time")
        return timedelta(seconds=seconds)


class SharedMemory:
    """What the sender shares on this host; a tensor stays readable for as long as the worker has it."""

    def __init__(self) -> None:
        self._opened: list[torch.UntypedStorage] = []

    def tensors(self, bucket: Bucket, worker: int) -> list[torch.Tensor]:
        if bucket.segment:
            opened = _in_segment(bucket)
        else:
            device, handles = _device_of(bucket.gpu), bucket.handles[worker]
            entries = zip(bucket.dtypes, bucket.shapes, handles, strict=True)
            opened = [_on_gpu(_dtype(name), shape, device, handle) for name, shape, handle in entries]
        self._opened += [tensor.untyped_storage() for tensor in opened]
        return opened

    def keep_apart(self, model: torch.nn.Module) -> None:
        """Copy the parameters and buffers that a loader made of the sender's tensors themselves."""
        shared = {storage.data_ptr() for storage in self._opened}
        for held in (*model.parameters(), *model.buffers()):
            if held.untyped_storage().data_ptr() in shared:
                held.data = held.data.clone()
        self._opened = []

    def close(self) -> None:
        self._opened = []


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Create a group without a watchdog in the body: torch's ends the whole worker if the sender dies."""
    before = os.environ.get(_UNWATCHED)
    os.environ[_UNWATCHED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNWATCHED]
        else:
            os.environ[_UNWATCHED] = before


def _in_segment(bucket: Bucket) -> list[torch.Tensor]:
    memory, opened = open_segment(bucket.segment), []
    for name, shape, offset in zip(bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        dtype, count = _dtype(name), prod(shape)
        if count == 0:
            opened.append(torch.empty(shape, dtype=dtype))
        else:
            opened.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape))
    return opened


def _on_gpu(dtype: torch.dtype, shape: list[int], device: int, handle: Mapping[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size(shape),
        tuple(handle["stride"]),
        handle["offset"],
        torch.storage.TypedStorage,
        dtype,
        device,
        b64decode(handle["memory"]),
        handle["size"],
        handle["start"],
        False,  # noqa: FBT003 - torch's own function: it needs no gradient
        b64decode(handle["counter"]),
        handle["counter_offset"],
        b64decode(handle["event"]),
        handle["event_is_awaited"],
    )
    return tensor


def _device_of(gpu: str) -> int:
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == gpu:
            return number
    raise RuntimeError(f"this worker does not see the sender's GPU {gpu}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype
