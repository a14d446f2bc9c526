"""How vLLM and SGLang take weights from memory: which requests begin, fill and end an update, on each way."""

import contextlib
from abc import ABC
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import structlog

from explorer_hooks.http_client import HttpClient
from explorer_hooks.parts.broadcast.delivery import QUICK, Delivery, Tensors, described
from explorer_hooks.parts.broadcast.group import GroupDelivery, Invitation
from explorer_hooks.parts.broadcast.ipc import IpcDelivery
from explorer_hooks.parts.broadcast.neighbours import require_shared_memory
from explorer_hooks.parts.broadcast.received import allocate
from explorer_hooks.parts.broadcast.segments import remove_leftovers
from explorer_hooks.parts.broadcast.shared import SharedBucket
from syncd.errors import EngineUnreachableError, LoadFailedError, SyncdError, first_line
from syncd.protocol.backend import NCCL

if TYPE_CHECKING:
    import torch

_LOG = structlog.get_logger()


class VllmDelivery(Delivery):
    """One version over the weight-transfer interface: init, start, update, finish."""

    begin, end = "/start_weight_update", "/finish_weight_update"
    hint = (
        "see the log of the vLLM server; it needs syncd in its environment and "
        '--weight-transfer-config \'{"backend": "syncd"}\''
    )

    def _count_workers(self) -> int:
        return worker_count("vLLM", "world_size", self._server.get_json("/get_world_size"))

    def _start(self) -> None:
        self.touched = self._is_updating = True
        self._begin_update()

    def _connect_workers(self, document: Mapping[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": document})

    def _load_bucket(self, document: Mapping[str, Any]) -> None:
        self._post("/update_weights", {"update_info": document})

    def _leave(self) -> None:
        if self._is_updating:
            self._server.post_raw(self.end, seconds=QUICK)
        self._server.post_raw("/shutdown_weight_transfer_engine", seconds=QUICK)


class VllmGroupDelivery(VllmDelivery, GroupDelivery):
    prefixes = ("{secret}",)

    def _open(self, buckets: Sequence[Tensors]) -> None:
        del buckets
        self._form_group(self._count_workers())
        self._start()

    def _invite(self, invitation: Invitation) -> None:
        self._connect_workers({**asdict(invitation), "timeout": self._server.timeout})

    def _update(self, tensors: Tensors, label: str | None) -> None:
        del label  # the hook tells it after caches are reset, as it does after files
        self._load_bucket(described(tensors))


class VllmNcclDelivery(VllmGroupDelivery):
    backend = NCCL

    def _connect_workers(self, document: Mapping[str, Any]) -> None:
        super()._connect_workers({**document, "backend": self.backend})


class VllmIpcDelivery(VllmDelivery, IpcDelivery):
    """vLLM, as shared memory that the backend of this package opens."""

    def _copies_tensors(self) -> bool:
        return True  # its end is this package's: see `SyncdEngine.finish_weight_update`

    def _meet(self, first: SharedBucket) -> None:
        self._connect_workers(first.location)

    def _update(self, bucket: SharedBucket, label: str | None) -> None:
        del label
        self._load_bucket(bucket.as_json())


class SGLangDelivery(Delivery):
    """One version within an update of SGLang."""

    begin, end = "/begin_weight_update", "/end_weight_update"
    may_lack_updates = True  # SGLang before 0.5.2x updates without a session
    hint = "see the log of the SGLang server"

    def _count_workers(self) -> int:
        return _workers(self._server.get_json("/server_info"))

    def _load_bucket(self, path: str, document: Mapping[str, Any], label: str | None) -> None:
        body = {**document, "flush_cache": self._flush_cache and label is not None}
        if label is not None:
            body["weight_version"] = label
        self._post(path, body)

    def _leave(self) -> None:
        if self._is_updating:
            before, self.touched = self.touched, True
            if not self._server.post_raw(self.end, seconds=QUICK).is_error:
                self.touched, self._is_updating = before, False


class SGLangGroupDelivery(SGLangDelivery, GroupDelivery):
    """SGLang, through a group: `init_weights_update_group` and `update_weights_from_distributed`."""

    prefixes = ("{secret}", "{secret}/", "cpu/")
    """Its own prefix, torch's, and the device that gloo is for."""
    _name = ""

    def _open(self, buckets: Sequence[Tensors]) -> None:
        del buckets
        workers = self._count_workers()
        # The scheduler itself answers this request, so it is idle then and joins the group at once. If it joined
        # late, it would wait half an hour for this process.
        self._begin_update()
        self._form_group(workers)

    def _invite(self, invitation: Invitation) -> None:
        self._name = invitation.secret
        body = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": 1,
            "world_size": invitation.world_size,
            "group_name": invitation.secret,
            "backend": self.backend,
        }
        self._post("/init_weights_update_group", body)

    def _update(self, tensors: Tensors, label: str | None) -> None:
        body = {**described(tensors), "group_name": self._name}
        self._load_bucket("/update_weights_from_distributed", body, label)

    def _leave(self) -> None:
        super()._leave()
        if self._name:
            self._server.post_raw("/destroy_weights_update_group", {"group_name": self._name}, seconds=QUICK)


class SGLangNcclDelivery(SGLangGroupDelivery):
    backend = NCCL
    greets = False
    prefixes = ("{secret}", "{secret}/", "cuda/")


class SGLangIpcDelivery(SGLangDelivery, IpcDelivery):
    """SGLang, as shared memory: `update_weights_from_tensor`."""

    def _copies_tensors(self) -> bool:
        # To its own device. On a CPU that is no copy, and whether a model's loader keeps a tensor is not known.
        return self._server.get_json("/server_info").get("device") not in {"cpu", None}

    def _meet(self, first: SharedBucket) -> None:
        require_shared_memory(self._server.port, first.workers, on_gpu="gpu" in first.location)

    def _start(self) -> None:
        self._begin_update()

    def _update(self, bucket: SharedBucket, label: str | None) -> None:
        body = {"serialized_named_tensors": [b64encode(pickled).decode() for pickled in bucket.as_pickles()]}
        self._load_bucket("/update_weights_from_tensor", body, label)


class Push(ABC):
    """One version into one engine, by the first of some ways that the engine takes.

    Args:
        address: The address of this host at which workers of the engine meet this process, if they do.
        ways: Names of ways, the best first; a later one is tried if the engine has not been touched.
    """

    deliveries: ClassVar[Mapping[str, type[Delivery]]]
    """How the engine takes weights, by the name of the way."""

    def __init__(
        self, server: HttpClient, address: str, ways: Sequence[str], *, flush_cache: bool = False
    ) -> None:
        self._server, self._address, self._ways, self._flush_cache = server, address, ways, flush_cache
        self.touched = False  # whether the engine's weights may have changed

    @classmethod
    def allocator(cls, ways: Sequence[str]) -> "Callable[[int], torch.Tensor] | None":
        """Return what allocates memory that an engine can open, None if no way needs it; remove what is left over."""
        remove_leftovers()
        return allocate if "ipc" in ways else None

    def run(self, label: str, tensors: Tensors) -> None:
        *others, last = self._ways
        for way in others:
            try:
                return self._deliver(way, label, tensors)
            except EngineUnreachableError:
                raise
            except SyncdError as error:
                if self.touched:
                    raise
                _LOG.warning("push_way_failed", way=way, reason=str(error))
        return self._deliver(last, label, tensors)

    def _deliver(self, way: str, label: str, tensors: Tensors) -> None:
        opened = self.deliveries[way](self._server, self._address, flush_cache=self._flush_cache)
        try:
            with contextlib.closing(opened):
                opened.push(label, tensors)
        except RuntimeError as error:  # torch's own, as for a GPU without room
            raise LoadFailedError(f"{way}: {first_line(error)}") from error
        finally:
            self.touched = opened.touched


class VllmPush(Push):
    deliveries: ClassVar = {"ipc": VllmIpcDelivery, "gloo": VllmGroupDelivery, "nccl": VllmNcclDelivery}


class SGLangPush(Push):
    deliveries: ClassVar = {
        "ipc": SGLangIpcDelivery,
        "gloo": SGLangGroupDelivery,
        "nccl": SGLangNcclDelivery,
    }


def worker_count(engine: str, name: str, answer: Mapping[str, object]) -> int:
    count = answer.get(name)
    if type(count) is not int or count < 1:
        raise LoadFailedError(f"{engine} reports {name} = {count!r}")
    return count


def _workers(info: Mapping[str, Any]) -> int:
    for key in ("dp_size", "pp_size"):
        if info.get(key, 1) != 1:
            raise LoadFailedError(f"SGLang with {key} = {info[key]} cannot take weights from memory")
    return worker_count("SGLang", "tp_size", info)
