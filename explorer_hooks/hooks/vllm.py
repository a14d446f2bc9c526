"""vllm: vLLM reads the weights again from a directory while requests wait.

The engine must be started with `VLLM_SERVER_DEV_MODE=1`; docs/follow-vllm.md says how, and what that exposes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.hook import Checksums, Running
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient
from explorer_hooks.proof.server_checksums import vllm_checksums
from explorer_hooks.proof.server_probes import (
    AdapterCompletionsProbe,
    CompletionsProbe,
    dtype_word,
    each_replica,
    rounding_flags,
)
from explorer_hooks.strict_json import positive
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError

BACKEND = "syncd"  # the name of the engine's back end; the part `broadcast` is the other end

NO_BACKEND = 'vLLM was started without --weight-transfer-config \'{"backend": "syncd"}\''

_LOG = "see the log of the vLLM server"

_FLAGS = (
    ("model_config", "dtype"),
    ("model_config", "quantization"),
    ("model_config", "enforce_eager"),
    ("model_config", "max_model_len"),
    ("cache_config", "cache_dtype"),
    ("cache_config", "enable_prefix_caching"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
    ("parallel_config", "data_parallel_size"),
    ("scheduler_config", "async_scheduling"),
    ("lora_config", "max_lora_rank"),
    ("lora_config", "max_loras"),
    ("lora_config", "fully_sharded_loras"),
)
"""The flags that a kind of engine consists of, as `/server_info` has them; not the directory of its model, which a
restart changes."""


class VllmHook(HttpEngineHook):
    """One vLLM server.

    Further settings: `pause`: how running requests are held (`keep`, `wait`, `abort`); `clear_cache`: whether they
    compute their keys and values again with the new weights; `reset_external`: whether caches behind a KV connector
    are reset too.
    """

    name = "vllm"
    product = "vLLM"
    oldest = (0, 27, 1)
    default_address = "http://127.0.0.1:8000"
    health_path, version_path = "/health", "/version"
    missing = (
        "start vLLM >= 0.27.1 with VLLM_SERVER_DEV_MODE=1 in its environment, on 127.0.0.1: "
        "these endpoints are not protected by --api-key"
    )

    def _configure(self, settings: HookSettings) -> None:
        super()._configure(settings)
        self._mode = settings.choice("pause", "keep", ("keep", "wait", "abort"))
        self._clear_cache = settings.flag("clear_cache", default=True)
        self._reset_external = settings.flag("reset_external", default=False)

    def current_version(self) -> Running:
        label = self._server.get_json("/weight_info").get("weight_version")
        paused = self._server.get_json("/is_paused").get("is_paused")
        if not isinstance(label, str) or not isinstance(paused, bool):
            raise EngineUnreachableError(
                "/weight_info or /is_paused is not answered as vLLM does", path=self._server.address
            )
        return self._running(label, paused=paused)

    def dtype(self) -> str | None:
        """Return the dtype of the model; None if the engine computes in another one too."""
        config = _configuration(self._server)
        return None if _rounding(config) else dtype_word(_part(config, "model_config").get("dtype"))

    def rounding(self) -> str:
        return _rounding(_configuration(self._server))

    def engine_kind(self) -> str:
        return self._kind_of(self.product, *release_and_flags(self._server))

    def checksums(self) -> Checksums | None:
        """Return the checksums that vLLM's development endpoint gives; none of parameters that its kernels packed."""
        return vllm_checksums(self._server)

    def _cannot_reload(self) -> str:
        parallel = _part(_configuration(self._server), "parallel_config")
        return "--enable-eplb" if parallel.get("enable_eplb") else ""

    def _server_probes(self) -> Sequence[CompletionsProbe]:
        config = _configuration(self._server)
        block_size = positive(_part(config, "cache_config").get("block_size"), 0)
        servers = each_replica(self._server, _replicas(_part(config, "parallel_config")))
        kind = AdapterCompletionsProbe if _part(config, "lora_config") else CompletionsProbe
        return [kind(server, block_size=block_size) for server in servers]

    def _started_from(self) -> str | None:
        models = self._server.get_json("/v1/models").get("data")
        cards = [card for card in models if isinstance(card, dict)] if isinstance(models, list) else []
        roots = [card.get("root") for card in cards if card.get("parent") is None]
        return roots[0] if roots and isinstance(roots[0], str) else None

    def _pause(self) -> None:
        self._server.post("/pause", hint=_LOG, mode=self._mode, clear_cache=self._clear_cache)

    def _reload(self, directory: str, label: str) -> None:
        del label  # it is set once caches are reset
        call = {"method": "reload_weights", "kwargs": {"weights_path": self._paths.there(directory)}}
        self._server.post(
            "/collective_rpc",
            call,
            hint="the log of the vLLM server has the reason; does it see this path, or is path_map needed?",
        )

    def _announce(self, label: str) -> None:
        self._reset_prefix_cache()
        self.mark(label)

    def mark(self, label: str) -> None:
        answer = self._server.post("/update_weight_version", {"new_version": label}, hint=_LOG)
        if answer.get("success") is not True:
            raise LoadFailedError(f"vLLM did not take the version: {answer}", path=self._server.address)

    def _reset_prefix_cache(self) -> None:
        # A reset fails while running requests hold blocks, unless they release them.
        answer = self._server.post(
            "/reset_prefix_cache",
            hint=_LOG,
            reset_running_requests=self._clear_cache,
            reset_external=self._reset_external,
        )
        if self._clear_cache and answer.get("success") is not True:
            raise LoadFailedError(
                "the prefix cache was not reset: requests would be answered with the old weights' keys and values",
                path=self._server.address,
                hint="restart vLLM if this happens again",
            )

    def no_broadcasts(self) -> str:
        """Return why the engine cannot take weights from memory, empty if it can: it needs a back end for them."""
        if reason := super().no_broadcasts():
            return reason
        try:
            return "" if is_ready(self._server) else NO_BACKEND
        except SyncdError as error:
            return str(error)

    def _resume(self) -> None:
        self._server.post("/resume", hint=_LOG)


def release_and_flags(server: HttpClient) -> tuple[object, Mapping[str, object]]:
    """Return vLLM's release and those of its flags that a restart does not change; none without `/server_info`."""
    version = (server.get_any("/version").document or {}).get("version")
    try:
        config = _configuration(server)
    except ConfigError:  # it was not started in development mode
        return version, {}
    return version, {f"{part}.{key}": _part(config, part).get(key) for part, key in _FLAGS}


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _rounding(config: Mapping[str, Any]) -> str:
    model, cache = _part(config, "model_config"), _part(config, "cache_config")
    return rounding_flags(model.get("dtype"), model.get("quantization"), cache.get("cache_dtype"))


def _replicas(parallel: Mapping[str, Any]) -> int:
    """Return how many data-parallel replicas a server passes requests on to, by its configuration."""
    if parallel.get("data_parallel_external_lb"):
        return 1
    local = parallel.get("data_parallel_hybrid_lb")
    return positive(parallel.get("data_parallel_size_local" if local else "data_parallel_size"), 1)


def is_ready(server: HttpClient) -> bool:
    """Return whether an engine was started with the back end."""
    transfer = _configuration(server).get("weight_transfer_config")
    return isinstance(transfer, Mapping) and transfer.get("backend") == BACKEND


def _configuration(server: HttpClient) -> Mapping[str, Any]:
    # The first answer takes seconds: vLLM looks at its host for it, by starting other programs.
    info = server.get_json("/server_info?config_format=json", server.timeout)
    config = info.get("vllm_config")
    return config if isinstance(config, Mapping) else {}
