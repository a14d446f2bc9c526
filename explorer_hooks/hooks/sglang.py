"""sglang: SGLang reads the weights again from a directory while requests wait, retracted to the queue.

A truncated shard or a tensor of another shape ends the whole SGLang server: after a failed load it reads the same
directory once more. So every version is checked before it reaches the server.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from explorer_hooks.engine_push.delivery import Delivery, Invitation, described, worker_count
from explorer_hooks.hook import HookSettings, Running, UntouchedError
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.hooks.probing import GenerateProbe, dtype_word
from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.transports.base import WeightDirectory

if TYPE_CHECKING:
    import torch

_LOG = "see the log of the SGLang server"
_BEFORE_THE_FIRST_TENSOR = ("Failed to get weights iterator", "Failed to get model loader")
_OK, _UNAVAILABLE = 200, 503

_PREFIXES = ("{secret}", "{secret}/", "cpu/")
"""The prefixes of keys with which SGLang's workers meet: its own, torch's, and the device that gloo is for."""

_BEGIN, _END = "/begin_weight_update", "/end_weight_update"
_QUICK = 10.0
"""Seconds that the engine may take to drop a group."""


class SGLangHook(HttpEngineHook):
    """One SGLang server.

    Further settings: `pause`: how running requests are held (`retract`, `abort`, `in_place`); `flush_cache`: whether
    keys and values of the old weights are dropped.
    """

    name = "sglang"
    product = "SGLang"
    oldest = (0, 5, 6)
    default_address = "http://127.0.0.1:30000"
    health_path, version_path = "/model_info", "/server_info"
    missing = (
        "start SGLang >= 0.5.6 (python -m sglang.launch_server) and give its own address, not a router's"
    )

    def _configure(self, settings: HookSettings) -> None:
        super()._configure(settings)
        self._mode = settings.choice("pause", "retract", ("retract", "abort", "in_place"))
        self._flush_cache = settings.flag("flush_cache", default=True)
        self._tells_readiness, self._resumed_by_us = True, False
        if self._mode == "in_place" and self._flush_cache:
            raise ConfigError(
                "pause=in_place keeps the keys and values of running requests, so the cache cannot be flushed",
                hint="pause=retract, or flush_cache=false if stale keys and values are acceptable",
            )

    def current_version(self) -> Running:
        """Return the label of the weights and whether the engine is paused."""
        label = self._server.get_json("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineUnreachableError(
                "/model_info is not answered as SGLang does", path=self._server.address
            )
        return self._running(label, paused=self._is_paused())

    def dtype(self) -> str | None:
        """Return the dtype that the engine was started with; None for `auto`, or if it is quantised."""
        info = self._server.get_json("/server_info")
        return None if info.get("quantization") else dtype_word(info.get("dtype"))

    def _server_probe(self) -> GenerateProbe:
        return GenerateProbe(self._server)

    def _is_paused(self) -> bool:
        """Return whether the engine takes no work.

        A release of SGLang that does not say counts as paused until this hook has resumed it: a needless load is
        better than an engine that nobody resumes.
        """
        reply = self._server.get_any("/ready")
        self._tells_readiness = reply.status in {_OK, _UNAVAILABLE}
        return reply.status == _UNAVAILABLE if self._tells_readiness else not self._resumed_by_us

    def _started_from(self) -> str | None:
        path = self._server.get_json("/model_info").get("model_path")
        return path if isinstance(path, str) else None

    def _pause(self) -> None:
        self._resumed_by_us = False
        self._server.post("/pause_generation", {"mode": self._mode}, hint=_LOG)

    def _reload(self, target: WeightDirectory) -> None:
        body = {
            "model_path": self._paths.there(target.path),
            "weight_version": target.label,
            "flush_cache": self._flush_cache,
        }
        reply = self._server.post_any("/update_weights_from_disk", body)
        answer = reply.document or {}
        if answer.get("success") is True:
            return
        # Only the message says whether tensors were written: the status is 400 either way.
        untouched = str(answer.get("message")).startswith(_BEFORE_THE_FIRST_TENSOR)
        raise (UntouchedError if untouched else LoadFailedError)(
            self._server.complaint(reply),
            path=self._server.address,
            hint="the log of the SGLang server has the reason; does it see this path, or is path_map needed?",
        )

    def _announce(self, label: str) -> None:
        """Do nothing: SGLang sets the label and flushes the cache while it loads."""

    def _set_engine_label(self, label: str) -> None:
        # By default SGLang aborts all requests for this.
        body = {"new_version": label, "abort_all_requests": False}
        self._server.post("/update_weight_version", body, hint=_LOG)

    def _delivery(self, address: str) -> Delivery:
        return SGLangDelivery(self._server, address, flush_cache=self._flush_cache)

    def _resume(self) -> None:
        self._server.post("/continue_generation", hint=_LOG)
        self._resumed_by_us = True


class SGLangDelivery(Delivery):
    """One version over `init_weights_update_group` and `update_weights_from_distributed`.

    Args:
        server: The server.
        address: The address of this host on which the group listens.
        flush_cache: Whether the engine drops keys and values of the old weights.
    """

    def __init__(self, server: HttpClient, address: str, *, flush_cache: bool) -> None:
        super().__init__(server, address)
        self._flush_cache = flush_cache
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
    return worker_count("SGLang", "tp_size", info)
