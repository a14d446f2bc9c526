"""sglang: SGLang reads the weights again from a directory while requests wait, retracted to the queue.

A truncated shard or a tensor of another shape ends the whole SGLang server: after a failed load it reads the same
directory once more. So every version is checked before it reaches the server.
"""

from typing import ClassVar, Self

from explorer_hooks.engine_push.delivery import Delivery, Link
from explorer_hooks.engine_push.sglang import SGLangDelivery
from explorer_hooks.hook import HookOptions, HookSettings, Running
from explorer_hooks.hooks.http_engine import HttpEngineHook, UntouchedError
from explorer_hooks.hooks.http_settings import PathMap, is_at_least, meeting_address, server_settings
from explorer_hooks.hooks.start_check import CHECKS
from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.transports.base import WeightDirectory

ADDRESS = "http://127.0.0.1:30000"
FLOOR = (0, 5, 6)

_LOG = "see the log of the SGLang server"
_MISSING = "start SGLang >= 0.5.6 (python -m sglang.launch_server) and give its own address, not a router's"
_BEFORE_THE_FIRST_TENSOR = ("Failed to get weights iterator", "Failed to get model loader")
_OK, _UNAVAILABLE = 200, 503


class SGLangHook(HttpEngineHook):
    """One SGLang server.

    Args:
        server: Its address.
        paths: How its paths differ from those of this host.
        pause: How running requests are held: `retract`, `abort`, `in_place`.
        flush_cache: Whether keys and values of the old weights are dropped.
        start_check: `full`, `shapes` or `off`: how a version is compared with the engine's start model.
        check_version: Whether versions of SGLang that are too old are refused.
        address: The address of this host at which its workers join a group; None for files alone.
    """

    name = "sglang"
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    restart_hint = "restart the SGLang server; it is loaded with the newest version before it takes work"

    def __init__(
        self,
        server: HttpClient,
        paths: PathMap,
        *,
        pause: str,
        flush_cache: bool,
        start_check: str,
        check_version: bool,
        address: str | None = None,
    ) -> None:
        super().__init__(server, paths, start_check, address)
        self._mode = pause
        self._flush_cache = flush_cache
        self._check_version = check_version
        self._tells_readiness = True
        self._resumed_by_us = False

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the server at the address, `http://127.0.0.1:30000` without one."""
        settings = HookSettings(cls.name, options.settings)
        server, paths = server_settings(settings, options, ADDRESS, _MISSING)
        pause = settings.choice("pause", "retract", ("retract", "abort", "in_place"))
        flush_cache = settings.flag("flush_cache", default=True)
        start_check = settings.choice("start_check", "full", CHECKS)
        check_version = settings.flag("check_version", default=True)
        address = meeting_address(settings, server)
        settings.done()
        if pause == "in_place" and flush_cache:
            raise ConfigError(
                "pause=in_place keeps the keys and values of running requests, so the cache cannot be flushed",
                hint="pause=retract, or flush_cache=false if stale keys and values are acceptable",
            )
        return cls(
            server,
            paths,
            pause=pause,
            flush_cache=flush_cache,
            start_check=start_check,
            check_version=check_version,
            address=address,
        )

    def current_version(self) -> Running:
        """Return the label of the weights and whether the engine is paused."""
        label = self._server.get_json("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineUnreachableError(
                "/model_info is not answered as SGLang does", path=self._server.address
            )
        return self._running(label, paused=self._is_paused())

    def _is_paused(self) -> bool:
        """Return whether the engine takes no work.

        A release of SGLang that does not say counts as paused until this hook has resumed it: a needless load is
        better than an engine that nobody resumes.
        """
        reply = self._server.get_any("/ready")
        self._tells_readiness = reply.status in {_OK, _UNAVAILABLE}
        return reply.status == _UNAVAILABLE if self._tells_readiness else not self._resumed_by_us

    def _check_engine(self) -> None:
        self._server.get("/model_info")
        if not self._check_version:
            return
        version = self._server.get_json("/server_info").get("version")
        if not is_at_least(version, FLOOR):
            raise ConfigError(
                f"the engine is SGLang {version}; loading while requests wait needs 0.5.6",
                path=self._server.address,
                hint="pip install 'sglang>=0.5.6'",
            )

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

    def _delivery(self, link: Link) -> Delivery:
        return SGLangDelivery(self._server, link, flush_cache=self._flush_cache)

    def _resume(self) -> None:
        self._server.post("/continue_generation", hint=_LOG)
        self._resumed_by_us = True
