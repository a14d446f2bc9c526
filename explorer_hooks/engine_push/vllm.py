"""Weights into vLLM by its weight-transfer interface: init, start, update, finish."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from explorer_hooks.engine_push.delivery import Delivery, Invitation, Link, described
from explorer_hooks.http_client import HttpClient
from syncd.errors import LoadFailedError

if TYPE_CHECKING:
    import torch

BACKEND = "syncd"
"""The name of the engine's back end; `vllm_backend.py` is the other end."""

_LOG = (
    "see the log of the vLLM server; it needs syncd in its environment and "
    '--weight-transfer-config \'{"backend": "syncd"}\''
)
_PREFIXES = ("{secret}",)
_START, _FINISH = "/start_weight_update", "/finish_weight_update"
_QUICK = 10.0


class VllmDelivery(Delivery):
    """One version on its way into a vLLM server.

    Args:
        server: The server.
        link: How the group is formed.
    """

    def __init__(self, server: HttpClient, link: Link) -> None:
        super().__init__(link)
        self._server = server
        self._is_started = False

    def open(self) -> None:
        """Form the group with the engine's workers, and begin an update."""
        self._form_group(_workers(self._server), _PREFIXES, self._invite)
        self.touched = self._is_started = True
        if self._server.post_raw(_START).is_error:
            # An earlier process died within an update.
            self._server.post(_FINISH, hint=_LOG)
            self._server.post(_START, hint=_LOG)

    def _invite(self, invitation: Invitation) -> None:
        document = {**asdict(invitation), "timeout": self._link.timeout}
        self._server.post("/init_weight_transfer_engine", {"init_info": document}, hint=_LOG)

    def _update(self, tensors: "Mapping[str, torch.Tensor]", label: str | None) -> None:
        del label  # the hook tells it after caches are reset, as it does after files
        self._server.post("/update_weights", {"update_info": described(tensors)}, hint=_LOG)

    def _finish_update(self) -> None:
        self._server.post(_FINISH, hint=_LOG)
        self._is_started = False

    def _leave(self) -> None:
        if self._is_started:
            self._server.post_raw(_FINISH, seconds=_QUICK)
        self._server.post_raw("/shutdown_weight_transfer_engine", seconds=_QUICK)


def is_ready(server: HttpClient) -> bool:
    """Return whether an engine was started with the back end.

    Raises:
        EngineUnreachableError: It does not answer.
        ConfigError: It has no development endpoints.
    """
    config = server.get_json("/server_info?config_format=json").get("vllm_config")
    transfer = config.get("weight_transfer_config") if isinstance(config, Mapping) else None
    return isinstance(transfer, Mapping) and transfer.get("backend") == BACKEND


def _workers(server: HttpClient) -> int:
    count = server.get_json("/get_world_size").get("world_size")
    if type(count) is not int or count < 1:
        raise LoadFailedError(f"vLLM reports a world size of {count!r}")
    return count
