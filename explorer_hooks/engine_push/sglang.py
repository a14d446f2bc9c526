"""Weights into SGLang over `init_weights_update_group` and `update_weights_from_distributed`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from explorer_hooks.engine_push.delivery import Delivery, Invitation, Link, described
from explorer_hooks.http_client import HttpClient
from syncd.errors import LoadFailedError

if TYPE_CHECKING:
    import torch

_LOG = "see the log of the SGLang server"
_PREFIXES = ("{secret}", "{secret}/", "cpu/")
"""The prefixes of keys with which SGLang's workers meet: its own, torch's, and the device that gloo is for."""

_BEGIN, _END = "/begin_weight_update", "/end_weight_update"
_QUICK = 10.0
"""Seconds that the engine may take to drop a group."""


class SGLangDelivery(Delivery):
    """One version on its way into a SGLang server.

    Args:
        server: The server.
        link: How the group is formed.
        flush_cache: Whether the engine drops keys and values of the old weights.
    """

    def __init__(self, server: HttpClient, link: Link, *, flush_cache: bool) -> None:
        super().__init__(link)
        self._server, self._flush_cache = server, flush_cache
        self._has_sessions = self._is_in_session = False
        self._name = ""

    def open(self) -> None:
        """Begin an update, and form the group with the engine's workers."""
        workers = _workers(self._server.get_json("/server_info"))
        # The scheduler itself answers this request, so it is idle then and joins the group at once. If it joined
        # late, it would wait half an hour for this process.
        self._begin()
        self._form_group(workers, _PREFIXES, self._invite)

    def _begin(self) -> None:
        reply = self._server.post_raw(_BEGIN)
        if reply.has_no_route:
            return  # SGLang before 0.5.2x updates without a session
        self._has_sessions = self._is_in_session = True
        if reply.is_error:
            # An earlier process died within a session.
            self._end()
            self._server.post(_BEGIN, hint=_LOG)
            self._is_in_session = True

    def _end(self) -> None:
        self._server.post(_END, hint=_LOG)
        self._is_in_session = False

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
        self._server.post("/init_weights_update_group", body, hint=_LOG)

    def _update(self, tensors: "Mapping[str, torch.Tensor]", label: str | None) -> None:
        body: dict[str, Any] = {**described(tensors), "group_name": self._name}
        body["flush_cache"] = self._flush_cache and label is not None
        if label is not None:
            body["weight_version"] = label
        self._server.post("/update_weights_from_distributed", body, hint=_LOG)

    def _finish_update(self) -> None:
        if self._has_sessions:
            self._end()

    def _leave(self) -> None:
        if self._is_in_session:
            before, self.touched = self.touched, True
            if not self._server.post_raw(_END, seconds=_QUICK).is_error:
                self.touched, self._is_in_session = before, False
        if self._name:
            self._server.post_raw("/destroy_weights_update_group", {"group_name": self._name}, seconds=_QUICK)


def _workers(info: Mapping[str, Any]) -> int:
    """Return how many workers of a server join a group.

    Raises:
        LoadFailedError: They are placed in a way for which its interface has no ranks.
    """
    for key in ("dp_size", "pp_size"):
        if info.get(key, 1) != 1:
            raise LoadFailedError(f"SGLang with {key} = {info[key]} cannot receive weights from a group")
    count = info.get("tp_size")
    if type(count) is not int or count < 1:
        raise LoadFailedError(f"SGLang reports tp_size = {count!r}")
    return count
