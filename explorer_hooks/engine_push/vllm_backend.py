"""A back end for vLLM's weight transfer: the sender is a follower beside the engine, over gloo or by shared memory.

This module is loaded by vLLM, in its own environment, through the entry point `vllm.general_plugins` of this
package, and needs nothing but torch and vLLM. An engine that was started as follows uses it:

    vllm serve MODEL --weight-transfer-config '{"backend": "syncd"}'

vLLM's own back ends are for a sender that has an accelerator which no worker has, or shares one by pickled handles of
CUDA IPC. Over gloo the sender needs no accelerator. Shared memory is named in JSON; nothing here reads a pickle.
"""

import contextlib
import time
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from explorer_hooks.engine_push.segments import open_segment

NAME = "syncd"

_DIST: Any = torch.distributed


@dataclass(kw_only=True)
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of one bucket.

    Args:
        names: Their names.
        dtypes: As torch names them.
        shapes: Their shapes.
        segment: The segment of shared memory that they are in, if they are in one.
        offsets: Where each begins in it, in bytes.
        gpu: The UUID of the GPU that they are on, if they come as handles.
        handles: For each worker, CUDA's handle of each tensor.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    segment: str = ""
    offsets: list[int] = field(default_factory=list)
    gpu: str = ""
    handles: list[list[dict[str, Any]]] = field(default_factory=list)


class Source(Protocol):
    """Where the tensors of a bucket come from."""

    def tensors(self, bucket: BucketInfo, worker: int) -> list[torch.Tensor]:
        """Return the tensors of a bucket for a worker."""

    def keep_apart(self, model: torch.nn.Module) -> None:
        """Have no parameter of a model use memory of the sender, which the next version may overwrite."""

    def close(self) -> None:
        """End it."""


@dataclass(kw_only=True)
class GroupInfo(WeightTransferInitInfo):
    """Where the group is.

    Args:
        address: The address on which its store listens.
        port: Its port.
        secret: The prefix of its keys.
        world_size: The workers of this engine, and the sender.
        timeout: Seconds that one version may take.
    """

    address: str
    port: int
    secret: str
    world_size: int
    timeout: float

    def open(self, worker: int) -> Source:
        """Join the group."""
        return Group(self, worker)


@dataclass(kw_only=True)
class PlaceInfo(WeightTransferInitInfo):
    """What the sender shares with the workers.

    Args:
        segment: A segment of shared memory, if the tensors are in main memory.
        gpu: The UUID of the GPU that they are on, else.
    """

    segment: str = ""
    gpu: str = ""

    def open(self, worker: int) -> Source:
        """Make sure that this worker sees it."""
        del worker
        if self.segment:
            try:
                open_segment(self.segment)
            except OSError as error:
                raise RuntimeError(f"this worker does not see the sender's memory: {error}") from error
        else:
            _device_of(self.gpu)
        return SharedMemory()


class Group:
    """One worker's end of a group over gloo.

    Args:
        info: Where the group is.
        worker: This worker, counted over all of them.
    """

    def __init__(self, info: GroupInfo, worker: int) -> None:
        self._end = time.monotonic() + info.timeout
        reached = _DIST.TCPStore(
            info.address,
            info.port,
            None,
            is_master=False,
            timeout=self._left(),
            wait_for_workers=False,
        )
        options = _DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - nothing else sets the address to listen on
        options._timeout = self._left()  # noqa: SLF001
        device = _DIST.ProcessGroupGloo.create_device(hostname=info.address)
        options._devices = [device]  # noqa: SLF001
        store = _DIST.PrefixStore(info.secret, reached)
        self._group = _DIST.ProcessGroupGloo(store, worker + 1, info.world_size, options)

    def tensors(self, bucket: BucketInfo, worker: int) -> list[torch.Tensor]:
        """Receive all tensors of a bucket."""
        del worker
        made = [
            torch.empty(shape, dtype=_dtype(name))
            for name, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
        ]
        for work in [self._broadcast(tensor) for tensor in made]:
            work.wait(self._left())
        return made

    def keep_apart(self, model: torch.nn.Module) -> None:
        """Do nothing: what was received is this worker's own."""

    def close(self) -> None:
        """Leave the group."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._left()
        return self._group.broadcast([tensor], options)

    def _left(self) -> timedelta:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the update did not finish in time")
        return timedelta(seconds=seconds)


class SharedMemory:
    """What the sender shares on this host; a tensor stays readable for as long as the worker has it."""

    def __init__(self) -> None:
        self._opened: list[torch.UntypedStorage] = []

    def tensors(self, bucket: BucketInfo, worker: int) -> list[torch.Tensor]:
        """Open all tensors of a bucket."""
        if bucket.segment:
            opened = _in_segment(bucket)
        else:
            device, handles = _device_of(bucket.gpu), bucket.handles[worker]
            given = zip(bucket.dtypes, bucket.shapes, handles, strict=True)
            opened = [_on_gpu(_dtype(name), shape, device, handle) for name, shape, handle in given]
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
        """Give up what was opened."""
        self._opened = []


class SyncdEngine(WeightTransferEngine[Any, BucketInfo]):
    """One worker's end of an update."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._source: Source | None = None

    @property
    def _worker(self) -> int:
        """Return this worker's number, counted over all replicas."""
        parallel = self.parallel_config
        number: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return number

    def parse_init_info(self, init_dict: dict[str, Any]) -> GroupInfo | PlaceInfo:
        """Return what the sender offers: a group, or memory of this host."""
        return GroupInfo(**init_dict) if "address" in init_dict else PlaceInfo(**init_dict)

    def init_transfer_engine(self, init_info: GroupInfo | PlaceInfo) -> None:
        """Connect with the sender."""
        self.shutdown()
        self._source = init_info.open(self._worker)

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # noqa: PLC0415

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Load what is left."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415

        finalize_layerwise_reload(self.model, self.model_config)
        if self._source is not None:
            self._source.keep_apart(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a bucket and load it; after a failure the model can still be loaded from files."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            with contextlib.suppress(Exception):
                self.finish_weight_update()
            raise
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Take all tensors of a bucket, then load them."""
        if self._source is None:
            raise RuntimeError("this worker is not connected with a sender")
        taken = self._source.tensors(update_info, self._worker)
        on_device = [tensor.to(self.device) for tensor in taken]
        self.model.load_weights(list(zip(update_info.names, on_device, strict=True)))

    def shutdown(self) -> None:
        """Leave the sender."""
        source, self._source = self._source, None
        if source is not None:
            source.close()


def register() -> None:
    """Register the back end; vLLM calls this in each of its processes, in some of them several times."""
    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(NAME, SyncdEngine)


def _in_segment(bucket: BucketInfo) -> list[torch.Tensor]:
    """Return the tensors of a bucket, as views of its segment."""
    memory, opened = open_segment(bucket.segment), []
    for name, shape, offset in zip(bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        dtype, count = _dtype(name), prod(shape)
        if count == 0:
            opened.append(torch.empty(shape, dtype=dtype))
        else:
            opened.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape))
    return opened


def _on_gpu(dtype: torch.dtype, shape: list[int], device: int, handle: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor in the sender's memory of a GPU."""
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
    """Return the number that this worker has for a GPU."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == gpu:
            return number
    raise RuntimeError(f"this worker does not see the sender's GPU {gpu}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return found
