"""sglang-lora: LoRA adapters in SGLang.

SGLang takes an adapter's name away at once and answers the unload only when the last request on it has ended; until
then no other adapter is loaded. So an old one is unloaded late (`drain`): SGLang does not say which adapters requests
use. A request that names an adapter which was unloaded has SGLang read its directory again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.hooks.adapter_server import AdapterServerHook
from explorer_hooks.hooks.sglang import release_and_flags
from explorer_hooks.hooks.sglang_adapter_limits import require_servable
from explorer_hooks.http_client import Reply
from explorer_hooks.proof.server_probes import GenerateProbe, require_known_tokens
from explorer_hooks.strict_json import positive
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.transports.base import WeightDirectory, WeightTensors

_LOAD, _UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
_UNLOADING = 10.0
"""Seconds that an unload is waited for; SGLang ends it by itself."""

_GONE, _HALF_UNLOADED = "does not exist", "has an incomplete unload"
"""Parts of SGLang's messages: no adapter has the name; an unload of it, or a load, did not reach the end."""


class SGLangLoraHook(AdapterServerHook):
    """One SGLang server that serves adapters: a request names one as its `lora_path`."""

    name = "sglang-lora"
    product = "SGLang"
    log = "see the log of the SGLang server, and its --max-lora-rank and --lora-target-modules"
    default_address = "http://127.0.0.1:30000"
    missing = "start SGLang with --enable-lora --max-lora-rank N --lora-target-modules NAME ..."

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Ask under the adapter's name; SGLang's cache keeps adapters apart, so it needs no check."""
        name = self.adapter_name(target) if isinstance(target, WeightDirectory) else None
        start = self._start_model()
        require_known_tokens(tokens, start.vocabulary if start else None)
        return ProbeAnswer(GenerateProbe(self._server, adapter=name).log_probs(tokens))

    def engine_kind(self) -> str:
        return self._kind_of(self.product, *release_and_flags(self._server))

    def _require_loadable(self, target: WeightDirectory, config: Mapping[str, Any]) -> None:
        info = self._server.get_json("/server_info")
        if info.get("enable_lora") is not True:
            problem = "SGLang was started without --enable-lora"
            raise ConfigError(problem, path=self._server.address, hint=self.missing)
        if (replicas := positive(info.get("dp_size"), 1)) > 1:
            problem = f"SGLang loads no adapters at run time with {replicas} data-parallel replicas"
            raise ConfigError(problem, path=self._server.address, hint="one server for each replica")
        require_servable(target, config, self._start_model())

    def _post_load(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        reply = self._server.post_any(_LOAD, body)
        if reply.is_error and _HALF_UNLOADED in _message(reply):
            self._unload(name)
            reply = self._server.post_any(_LOAD, body)
        self._require_success(reply)

    def _unload(self, name: str) -> None:
        try:
            reply = self._server.post_raw(_UNLOAD, {"lora_name": name}, _UNLOADING)
        except EngineUnreachableError:
            if name in self._listed():
                raise
            return
        if not (reply.is_error and _GONE in _message(reply)):
            self._require_success(reply)

    def _require_success(self, reply: Reply) -> None:
        if reply.is_error or (reply.document or {}).get("success") is not True:
            raise LoadFailedError(self._server.complaint(reply), path=self._server.address, hint=self.log)

    def _used(self) -> None:
        """Return that SGLang does not say which adapters requests use."""

    def _started_from(self) -> str:
        path = self._server.get_json("/model_info").get("model_path")
        return path if isinstance(path, str) else ""


def _message(reply: Reply) -> str:
    return str((reply.document or {}).get("error_message"))
