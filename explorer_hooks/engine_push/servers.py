"""How vLLM and SGLang take weights from memory: which requests begin, fill and end an update."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from explorer_hooks.engine_push.delivery import Delivery, Invitation, described
from syncd.errors import LoadFailedError

_QUICK = 10.0
"""Seconds that an engine may take to drop a group."""


class VllmDelivery(Delivery):
    """One version over the weight-transfer interface: init, start, update, finish."""

    prefixes = ("{secret}",)
    begin, end = "/start_weight_update", "/finish_weight_update"
    hint = (
        "see the log of the vLLM server; it needs syncd in its environment and "
        '--weight-transfer-config \'{"backend": "syncd"}\''
    )

    def _open(self) -> None:
        """Form the group with the engine's workers, and begin an update."""
        self._form_group(worker_count("vLLM", "world_size", self._server.get_json("/get_world_size")))
        self.touched = self._is_updating = True
        self._begin_update()

    def _invite(self, invitation: Invitation) -> None:
        document = {**asdict(invitation), "timeout": self._server.timeout}
        self._post("/init_weight_transfer_engine", {"init_info": document})

    def _update(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        del label  # the hook tells it after caches are reset, as it does after files
        self._post("/update_weights", {"update_info": described(tensors)})

    def _leave(self) -> None:
        if self._is_updating:
            self._server.post_raw(self.end, seconds=_QUICK)
        self._server.post_raw("/shutdown_weight_transfer_engine", seconds=_QUICK)


class SGLangDelivery(Delivery):
    """One version over `init_weights_update_group` and `update_weights_from_distributed`."""

    prefixes = ("{secret}", "{secret}/", "cpu/")
    """Its own prefix, torch's, and the device that gloo is for."""
    begin, end = "/begin_weight_update", "/end_weight_update"
    may_lack_updates = True  # SGLang before 0.5.2x updates without a session
    hint = "see the log of the SGLang server"
    _name = ""

    def _open(self) -> None:
        """Begin an update, and form the group with the engine's workers."""
        workers = _workers(self._server.get_json("/server_info"))
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
            "backend": "gloo",
        }
        self._post("/init_weights_update_group", body)

    def _update(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        body: dict[str, Any] = {**described(tensors), "group_name": self._name}
        body["flush_cache"] = self._flush_cache and label is not None
        if label is not None:
            body["weight_version"] = label
        self._post("/update_weights_from_distributed", body)

    def _leave(self) -> None:
        if self._is_updating:
            before, self.touched = self.touched, True
            if not self._server.post_raw(self.end, seconds=_QUICK).is_error:
                self.touched, self._is_updating = before, False
        if self._name:
            self._server.post_raw("/destroy_weights_update_group", {"group_name": self._name}, seconds=_QUICK)


def worker_count(engine: str, name: str, answer: Mapping[str, object]) -> int:
    """Return how many workers of an engine join a group, which it reports under a name.

    Raises:
        LoadFailedError: It reports none.
    """
    count = answer.get(name)
    if type(count) is not int or count < 1:
        raise LoadFailedError(f"{engine} reports {name} = {count!r}")
    return count


def _workers(info: Mapping[str, Any]) -> int:
    """Return how many workers of a server join a group.

    Raises:
        LoadFailedError: They are placed in a way for which its interface has no ranks.
    """
    for key in ("dp_size", "pp_size"):
        if info.get(key, 1) != 1:
            raise LoadFailedError(f"SGLang with {key} = {info[key]} cannot receive weights from a group")
    return worker_count("SGLang", "tp_size", info)
