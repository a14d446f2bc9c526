"""vllm: vLLM reads the weights again from a directory while requests wait.

The engine must be started with `VLLM_SERVER_DEV_MODE=1`; docs/engines-vllm-sglang.md says how, and what that exposes.
"""

from typing import ClassVar, Self

from explorer_hooks.engine_push.delivery import Delivery, Link
from explorer_hooks.engine_push.vllm import VllmDelivery, is_ready
from explorer_hooks.hook import HookOptions, HookSettings, Running
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.hooks.http_settings import PathMap, is_at_least, meeting_address, server_settings
from explorer_hooks.hooks.start_check import CHECKS
from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.transports.base import WeightDirectory

ADDRESS = "http://127.0.0.1:8000"
FLOOR = (0, 27, 1)

NO_BACKEND = 'vLLM was started without --weight-transfer-config \'{"backend": "syncd"}\''

_MISSING = (
    "start vLLM >= 0.27.1 with VLLM_SERVER_DEV_MODE=1 in its environment, on 127.0.0.1: "
    "these endpoints are not protected by --api-key"
)


class VllmHook(HttpEngineHook):
    """One vLLM server.

    Args:
        server: Its address.
        paths: How its paths differ from those of this host.
        pause: How running requests are held: `keep`, `wait`, `abort`.
        clear_cache: Whether running requests compute their keys and values again with the new weights.
        reset_external: Whether caches behind a KV connector are reset too.
        start_check: `full`, `shapes` or `off`: how a version is compared with the engine's start model.
        check_version: Whether versions of vLLM that are too old are refused.
        address: The address of this host at which its workers join a group; None for files alone.
    """

    name = "vllm"
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    restart_hint = "restart the vLLM server; it is loaded with the newest version before it takes work"

    def __init__(
        self,
        server: HttpClient,
        paths: PathMap,
        *,
        pause: str,
        clear_cache: bool,
        reset_external: bool,
        start_check: str,
        check_version: bool,
        address: str | None = None,
    ) -> None:
        super().__init__(server, paths, start_check, address)
        self._mode = pause
        self._clear_cache = clear_cache
        self._reset_external = reset_external
        self._check_version = check_version

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the server at the address, `http://127.0.0.1:8000` without one."""
        settings = HookSettings(cls.name, options.settings)
        server, paths = server_settings(settings, options, ADDRESS, _MISSING)
        hook = cls(
            server,
            paths,
            pause=settings.choice("pause", "keep", ("keep", "wait", "abort")),
            clear_cache=settings.flag("clear_cache", default=True),
            reset_external=settings.flag("reset_external", default=False),
            start_check=settings.choice("start_check", "full", CHECKS),
            check_version=settings.flag("check_version", default=True),
            address=meeting_address(settings, server),
        )
        settings.done()
        return hook

    def current_version(self) -> Running:
        """Return the label that the engine was given last and whether it is paused."""
        label = self._server.get_json("/weight_info").get("weight_version")
        paused = self._server.get_json("/is_paused").get("is_paused")
        if not isinstance(label, str) or not isinstance(paused, bool):
            raise EngineUnreachableError(
                "/weight_info or /is_paused is not answered as vLLM does", path=self._server.address
            )
        return self._running(label, paused=paused)

    def _check_engine(self) -> None:
        self._server.get("/health")
        if not self._check_version:
            return
        version = self._server.get_json("/version").get("version")
        if not is_at_least(version, FLOOR):
            raise ConfigError(
                f"the engine is vLLM {version}; versions of weights need 0.27.1",
                path=self._server.address,
                hint="pip install 'vllm>=0.27.1'",
            )

    def _started_from(self) -> str | None:
        models = self._server.get_json("/v1/models").get("data")
        cards = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        roots = [one.get("root") for one in cards if one.get("parent") is None]
        return roots[0] if roots and isinstance(roots[0], str) else None

    def _pause(self) -> None:
        self._server.post(
            "/pause",
            hint="see the log of the vLLM server",
            mode=self._mode,
            clear_cache=_word(self._clear_cache),
        )

    def _reload(self, target: WeightDirectory) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": self._paths.there(target.path)}}
        self._server.post(
            "/collective_rpc",
            call,
            hint="the log of the vLLM server has the reason; does it see this path, or is path_map needed?",
        )

    def _announce(self, label: str) -> None:
        self._reset_prefix_cache()
        self._set_engine_label(label)

    def _set_engine_label(self, label: str) -> None:
        told = self._server.post(
            "/update_weight_version", {"new_version": label}, hint="see the log of the vLLM server"
        )
        if told.get("success") is not True:
            raise LoadFailedError(f"vLLM did not take the version: {told}", path=self._server.address)

    def _reset_prefix_cache(self) -> None:
        # A reset fails while running requests hold blocks, unless they release them.
        answer = self._server.post(
            "/reset_prefix_cache",
            hint="see the log of the vLLM server",
            reset_running_requests=_word(self._clear_cache),
            reset_external=_word(self._reset_external),
        )
        if self._clear_cache and answer.get("success") is not True:
            raise LoadFailedError(
                "the prefix cache was not reset: requests would be answered with the old weights' keys and values",
                path=self._server.address,
                hint="restart vLLM if this goes on",
            )

    def no_broadcasts(self) -> str:
        """Return why the engine cannot take weights from memory, empty if it can: it needs a back end for them."""
        return super().no_broadcasts() or self._no_backend()

    def _no_backend(self) -> str:
        try:
            return "" if is_ready(self._server) else NO_BACKEND
        except SyncdError as error:
            return str(error)

    def _delivery(self, link: Link) -> Delivery:
        return VllmDelivery(self._server, link)

    def _resume(self) -> None:
        self._server.post("/resume", hint="see the log of the vLLM server")


def _word(flag: bool) -> str:  # noqa: FBT001 - the value itself
    return "true" if flag else "false"
