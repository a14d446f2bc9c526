"""sglang-lora: LoRA adapters in SGLang.

SGLang takes an adapter's name away at once and answers the unload only when the last request on it has ended; until
then no other adapter is loaded. So an old one is unloaded late (`drain`): SGLang does not say which adapters requests
use. A request that names an adapter which was unloaded has SGLang read its directory again.

What SGLang 0.5.23 does not look at before it takes an adapter, `require_servable` refuses. SGLang compares an adapter
with the model when the first request names it, and ends if they do not fit (`adapters.py`) or the model has
none of its layers. It computes q_proj, k_proj and v_proj as one layer, gate_proj and up_proj as another: of the first
it needs q_proj and v_proj of the adapter, of the second gate_proj, else it finds no layer for the rest and ends too.
It adds B.A times alpha / rank, whatever else the adapter's configuration says.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.hooks.adapter_server import AdapterServerHook
from explorer_hooks.hooks.adapters import layers_of, refused, require_shapes
from explorer_hooks.hooks.sglang import release_and_flags, started_from
from explorer_hooks.http_client import Reply
from explorer_hooks.proof.server_probes import GenerateProbe, require_known_tokens
from explorer_hooks.proof.start_model import StartModel
from explorer_hooks.strict_json import positive
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.tensors import Tensors

_LOAD, _UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
_UNLOADING = 10.0  # seconds that an unload is waited for; SGLang ends it by itself

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
        return started_from(self._server) or ""


def _message(reply: Reply) -> str:
    return str((reply.document or {}).get("error_message"))


_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
_NO_BIAS = "none"
_NEEDED = {
    "q_proj": ("q_proj", "v_proj"),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj", "v_proj"),
    "up_proj": ("gate_proj",),
}
"""The layers beside it that an adapter must have too if it has one of this name."""


def require_servable(target: WeightDirectory, config: Mapping[str, Any], start: StartModel | None) -> None:
    """Return if SGLang serves an adapter as peft does, and survives it.

    Args:
        start: The model that the server was started with; None if this host cannot read it, then names and shapes are
            not compared with it.
    """
    _require_plain(target, config)
    layers = layers_of(target)
    if layers.others:
        raise refused(target, f"{layers.others[0]} is no A or B of a layer")
    require_shapes(target, config, layers, start)
    model = None if start is None else start.tensors
    for layer in layers.halves:
        if model is not None and f"{layer}.weight" not in model:
            raise refused(target, f"the engine's model has no {layer}")
        _require_stack(target, layer, layers.halves.keys(), model)


def _require_plain(target: WeightDirectory, config: Mapping[str, Any]) -> None:
    """Return if an adapter is B.A times alpha / rank for each layer, and nothing besides."""
    unsupported = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", _NO_BIAS) != _NO_BIAS:
        unsupported.append("bias")
    if unsupported:
        raise RefusedError(
            f"SGLang serves no adapters with {', '.join(unsupported)}",
            path=target.path,
            hint='kind = "vllm", or train without',
        )


def _require_stack(
    target: WeightDirectory, layer: str, layers: Collection[str], model: Tensors | None
) -> None:
    parent, _, own = layer.rpartition(".")
    for other in _NEEDED.get(own, ()):
        beside = f"{parent}.{other}"
        if beside not in layers and (model is None or f"{beside}.weight" in model):
            raise refused(target, f"it has {layer} without {beside}, which SGLang computes together")
