"""SGLang: weights are read again from a directory while requests wait, retracted to the queue.

A shard that is cut off or a tensor of another shape ends the whole SGLang server: what it does about a failed load is
to read the same directory once more. So nothing reaches it that was not checked before.
"""

from typing import ClassVar, Self

from explorer_hooks.engine_push.delivery import Delivery, Link
from explorer_hooks.engine_push.sglang import SGLangDelivery
from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.http_engine import (
    PathMap,
    ServedHook,
    UntouchedError,
    floor,
    meeting_address,
    server_settings,
)
from explorer_hooks.hooks.settings import Settings
from explorer_hooks.hooks.start_check import CHECKS
from explorer_hooks.http_client import Server
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.transports.base import WeightDirectory

ADDRESS = "http://127.0.0.1:30000"
FLOOR = (0, 5, 6)

_LOG = "see the log of the SGLang server"
_MISSING = "start SGLang >= 0.5.6 (python -m sglang.launch_server) and give its own address, not a router's"
_BEFORE_THE_FIRST_TENSOR = ("Failed to get weights iterator", "Failed to get model loader")
_OK, _UNAVAILABLE = 200, 503


class SGLangHook(ServedHook):
    """One SGLang server.

    Args:
        server: Where it listens.
        paths: How its paths differ from those of this host.
        pause: What becomes of running requests: `retract`, `abort`, `in_place`.
        flush_cache: Whether keys and values of the old weights are dropped.
        start_check: `full`, `shapes` or `off`: how a version is compared with what the engine was started from.
        check_version: Whether versions of SGLang that are too old are refused.
        address: The address of this host on which its workers meet it; None for files alone.
    """

    name = "sglang"
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    restart_hint = "restart the SGLang server; it is loaded with the newest version before it takes work"

    def __init__(
        self,
        server: Server,
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
        settings = Settings(cls.name, options.settings)
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
        """Ask for the version of the weights and whether the engine is paused."""
        label = self._server.ask_json("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineUnreachableError(
                "/model_info is not answered as SGLang does", path=self._server.address
            )
        return self._running(label, paused=self._is_paused())

    def _is_paused(self) -> bool:
        """Ask whether it takes work.

        SGLang that cannot say so counts as paused until this hook has resumed it: a load that was not needed is
        better than an engine that nobody resumes.
        """
        reply = self._server.look("/ready")
        self._tells_readiness = reply.status in {_OK, _UNAVAILABLE}
        return reply.status == _UNAVAILABLE if self._tells_readiness else not self._resumed_by_us

    def _check_engine(self) -> None:
        self._server.ask("/model_info")
        if not self._check_version:
            return
        version = self._server.ask_json("/server_info").get("version")
        if not floor(version, FLOOR):
            raise ConfigError(
                f"the engine is SGLang {version}; loading while requests wait needs 0.5.6",
                path=self._server.address,
                hint="pip install 'sglang>=0.5.6'",
            )

    def _started_from(self) -> str | None:
        path = self._server.ask_json("/model_info").get("model_path")
        return path if isinstance(path, str) else None

    def _pause(self) -> None:
        self._resumed_by_us = False
        self._server.tell("/pause_generation", {"mode": self._mode}, hint=_LOG)

    def _reload(self, target: WeightDirectory) -> None:
        body = {
            "model_path": self._paths.there(target.path),
            "weight_version": target.label,
            "flush_cache": self._flush_cache,
        }
        reply = self._server.tried("/update_weights_from_disk", body)
        answer = reply.document or {}
        if answer.get("success") is True:
            return
        # Only its message tells whether tensors were written before it: the status is 400 either way.
        untouched = str(answer.get("message")).startswith(_BEFORE_THE_FIRST_TENSOR)
        raise (UntouchedError if untouched else LoadFailedError)(
            self._server.complaint(reply),
            path=self._server.address,
            hint="the log of the SGLang server has the reason; does it see this path, or is path_map needed?",
        )

    def _announce(self, label: str) -> None:
        """Nothing is left to do: the version and the cache change in one with the weights."""

    def _tell_version(self, label: str) -> None:
        # Unless it is told otherwise, SGLang ends all that runs for this.
        body = {"new_version": label, "abort_all_requests": False}
        self._server.tell("/update_weight_version", body, hint=_LOG)

    def _delivery(self, link: Link) -> Delivery:
        return SGLangDelivery(self._server, link, flush_cache=self._flush_cache)

    def _resume(self) -> None:
        self._server.tell("/continue_generation", hint=_LOG)
        self._resumed_by_us = True
