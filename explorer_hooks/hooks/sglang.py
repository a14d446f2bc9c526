"""sglang: SGLang reads the weights again from a directory while requests wait, retracted to the queue.

A truncated shard or a tensor of another shape ends the whole SGLang server: after a failed load it reads the same
directory once more. So every version is checked before it reaches the server.
"""

from collections.abc import Mapping, Sequence

from explorer_hooks.hook import Checksums, Running, UntouchedError
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient
from explorer_hooks.proof.server_checksums import sglang_checksums
from explorer_hooks.proof.server_probes import GenerateProbe, dtype_word, rounding_flags
from explorer_hooks.strict_json import positive
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError

_LOG = "see the log of the SGLang server"
_BEFORE_THE_FIRST_TENSOR = ("Failed to get weights iterator", "Failed to get model loader")
_OK, _UNAVAILABLE = 200, 503
_FLAGS = (
    "dtype", "quantization", "kv_cache_dtype", "context_length", "attention_backend", "sampling_backend", "tp_size",
    "pp_size", "dp_size", "enable_lora", "max_lora_rank", "lora_backend", "lora_target_modules",
    "speculative_algorithm", "disable_overlap_schedule", "disable_radix_cache", "disable_cuda_graph",
)  # fmt: skip
"""The flags that a kind of engine consists of, as `/server_info` has them."""


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
        label = self._server.get_json("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineUnreachableError(
                "/model_info is not answered as SGLang does", path=self._server.address
            )
        return self._running(label, paused=self._is_paused())

    def dtype(self) -> str | None:
        """Return the dtype that the engine was started with; None for `auto`, or if it has another one too."""
        return None if self.rounding() else dtype_word(self._server.get_json("/server_info").get("dtype"))

    def rounding(self) -> str:
        info = self._server.get_json("/server_info")
        return rounding_flags(info.get("dtype"), info.get("quantization"), info.get("kv_cache_dtype"))

    def engine_kind(self) -> str:
        return self._kind_of(self.product, *release_and_flags(self._server))

    def checksums(self) -> Checksums | None:
        return sglang_checksums(self._server)

    def _server_probes(self) -> Sequence[GenerateProbe]:
        replicas = positive(self._server.get_json("/server_info").get("dp_size"), 1)
        if replicas == 1:
            return [GenerateProbe(self._server)]
        return [GenerateProbe(self._server, rank) for rank in range(replicas)]

    def _is_paused(self) -> bool:
        """Return whether the engine takes no work.

        A release of SGLang that does not say counts as paused until this hook has resumed it: a needless load is
        better than an engine that nobody resumes.
        """
        reply = self._server.get_any("/ready")
        self._tells_readiness = reply.status in {_OK, _UNAVAILABLE}
        return reply.status == _UNAVAILABLE if self._tells_readiness else not self._resumed_by_us

    def _started_from(self) -> str | None:
        return started_from(self._server)

    def _pause(self) -> None:
        self._resumed_by_us = False
        self._server.post("/pause_generation", {"mode": self._mode}, hint=_LOG)

    def _reload(self, directory: str, label: str) -> None:
        body = {
            "model_path": self._paths.there(directory),
            "weight_version": label,
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

    def mark(self, label: str) -> None:
        # By default SGLang aborts all requests for this.
        body = {"new_version": label, "abort_all_requests": False}
        self._server.post("/update_weight_version", body, hint=_LOG)

    def _resume(self) -> None:
        self._server.post("/continue_generation", hint=_LOG)
        self._resumed_by_us = True


def started_from(server: HttpClient) -> str | None:
    """Return the directory that SGLang was started from; `/model_info` names the one that it has loaded last."""
    path = server.get_json("/server_info").get("model_path")
    return path if isinstance(path, str) else None


def release_and_flags(server: HttpClient) -> tuple[object, Mapping[str, object]]:
    """Return SGLang's release and those of its flags that a restart does not change."""
    info = server.get_json("/server_info")
    return info.get("version"), {key: info.get(key) for key in _FLAGS}
