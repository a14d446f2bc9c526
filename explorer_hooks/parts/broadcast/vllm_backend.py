"""A back end for vLLM's weight transfer, whose sender is a follower: over gloo or NCCL, or by memory of the host.

This module is loaded by vLLM, in its own environment, through the entry point `vllm.general_plugins` of this
package, and needs nothing but torch and vLLM. An engine that was started as follows uses it:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --weight-transfer-config '{"backend": "syncd"}'

vLLM's own back ends are for a sender that has an accelerator which no worker has, or shares one by pickled handles of
CUDA IPC. Over gloo the sender needs no accelerator. Shared memory is named in JSON; nothing here reads a pickle.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from explorer_hooks.parts.broadcast.worker import Bucket, Meeting, Place, Source

NAME = "syncd"


@dataclass(kw_only=True)
class BucketInfo(Bucket, WeightTransferUpdateInfo):
    """A bucket, as vLLM passes it on."""


@dataclass(kw_only=True)
class GroupInfo(Meeting, WeightTransferInitInfo):
    """Where the group is, as vLLM passes it on."""


@dataclass(kw_only=True)
class PlaceInfo(Place, WeightTransferInitInfo):
    """What the sender shares, as vLLM passes it on."""


class SyncdEngine(WeightTransferEngine[Any, BucketInfo]):
    """One worker's end of an update."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._source: Source | None = None

    @property
    def _worker(self) -> int:
        """Return this worker's number, counted over all replicas."""
        parallel = self.parallel_config
        number: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return number

    def parse_init_info(self, init_dict: dict[str, Any]) -> GroupInfo | PlaceInfo:
        return GroupInfo(**init_dict) if "address" in init_dict else PlaceInfo(**init_dict)

    def init_transfer_engine(self, init_info: GroupInfo | PlaceInfo) -> None:
        self.shutdown()
        self._source = init_info.open(self._worker, self.device)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # noqa: PLC0415

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
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
        if self._source is None:
            raise RuntimeError("this worker is not connected with a sender")
        taken = self._source.tensors(update_info, self._worker)
        on_device = [tensor.to(self.device) for tensor in taken]
        self.model.load_weights(list(zip(update_info.names, on_device, strict=True)))

    def shutdown(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()


def register() -> None:
    """Register the back end; vLLM calls this in each of its processes, in some of them several times."""
    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(NAME, SyncdEngine)
