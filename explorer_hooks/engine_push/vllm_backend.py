"""A back end for vLLM's weight transfer over gloo: the sender, a follower beside the engine, needs no accelerator.

This module is loaded by vLLM, in its own environment, through the entry point `vllm.general_plugins` of this
package, and needs nothing but torch and vLLM. An engine that was started as follows uses it:

    vllm serve MODEL --weight-transfer-config '{"backend": "syncd"}'

vLLM's own back ends are for a sender that has an accelerator which no worker has, or shares one by CUDA IPC.
"""

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "syncd"

_DIST: Any = torch.distributed


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


@dataclass(kw_only=True)
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of one bucket.

    Args:
        names: Their names.
        dtypes: As torch names them.
        shapes: Their shapes.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """One worker's end of the group."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._group: Any = None
        self._end = 0.0

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._end = time.monotonic() + init_info.timeout
        reached = _DIST.TCPStore(
            init_info.address,
            init_info.port,
            None,
            is_master=False,
            timeout=self._left(),
            wait_for_workers=False,
        )
        options = _DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - nothing else sets the address to listen on
        options._timeout = self._left()  # noqa: SLF001
        device = _DIST.ProcessGroupGloo.create_device(hostname=init_info.address)
        options._devices = [device]  # noqa: SLF001
        store = _DIST.PrefixStore(init_info.secret, reached)
        self._group = _DIST.ProcessGroupGloo(store, worker + 1, init_info.world_size, options)

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # noqa: PLC0415

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Load what is left."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket and load it; after a failure the model can still be loaded from files."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            with contextlib.suppress(Exception):
                self.finish_weight_update()
            raise
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive all tensors of a bucket, then load them."""
        if self._group is None:
            raise RuntimeError("this worker is in no group")
        weights, works = [], []
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            weights.append((name, tensor))
            works.append(self._broadcast(tensor))
        for work in works:
            work.wait(self._left())
        self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in weights])

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

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


def register() -> None:
    """Register the back end; vLLM calls this in each of its processes, in some of them several times."""
    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(NAME, GlooEngine)
