"""lora: LoRA adapters in vLLM.

vLLM's metric `vllm:lora_requests_info` has one line for each set of adapters that was ever in use together; its value
is the last time of such use, so the line with the highest value is the newest. The engine writes it after each step:
it may still name an adapter whose last request has just ended, but never lacks one in use.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.hooks.adapter_server import AdapterServerHook
from explorer_hooks.hooks.adapters import layers_of, require_shapes
from explorer_hooks.hooks.vllm import release_and_flags
from explorer_hooks.http_client import HttpClient
from explorer_hooks.proof.server_probes import AdapterCompletionsProbe, each_replica
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.transports.base import WeightDirectory, WeightTensors

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_GONE = 404
_METRIC = "vllm:lora_requests_info"
_METRIC_LINE = re.compile(rf"^{_METRIC}{{(?P<labels>[^}}]*)}}\s+(?P<value>\S+)", re.MULTILINE)
_ENGINE = re.compile(r'^vllm:num_requests_running{[^}]*?engine="(?P<engine>\d+)"', re.MULTILINE)
_METRIC_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>[^"]*)"')
_ADAPTERS = frozenset({"running_lora_adapters", "waiting_lora_adapters"})


class LoraHook(AdapterServerHook):
    """One vLLM server that serves adapters: a request names one as its `model`."""

    name = "lora"
    product = "vLLM"
    log = "see the log of the vLLM server; --max-lora-rank must be at least the adapter's rank"
    default_address = "http://127.0.0.1:8000"
    missing = (
        "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, "
        "on 127.0.0.1"
    )

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Ask each replica under the adapter's name; vLLM's cache keeps names apart, so it needs no check."""
        name = self.adapter_name(target) if isinstance(target, WeightDirectory) else None
        servers = each_replica(self._server, replicas_in(_metrics(self._server)))
        first, *others = [
            ProbeAnswer(AdapterCompletionsProbe(server, name).log_probs(tokens)) for server in servers
        ]
        return first._replace(others=tuple(others))

    def engine_kind(self) -> str:
        return self._kind_of(self.product, *release_and_flags(self._server))

    def _require_loadable(self, target: WeightDirectory, config: Mapping[str, Any]) -> None:
        require_shapes(target, config, layers_of(target), self._start_model())
        # A request that names no adapter: a server that can load adapters refuses it, others do not know the path.
        self._server.post_any(_LOAD, {"lora_name": "", "lora_path": ""})

    def _post_load(self, name: str, path: str) -> None:
        self._server.post(_LOAD, {"lora_name": name, "lora_path": path}, hint=self.log)

    def _unload(self, name: str) -> None:
        reply = self._server.post_any(_UNLOAD, {"lora_name": name})
        if reply.is_error and reply.status != _GONE:
            raise LoadFailedError(self._server.complaint(reply), path=self._server.address, hint=self.log)

    def _used(self) -> frozenset[str] | None:
        return adapters_in(_metrics(self._server))

    def _started_from(self) -> str:
        roots = [str(model.get("root")) for model in self._models() if not model.get("parent")]
        return roots[0] if roots else ""


def _metrics(server: HttpClient) -> str:
    try:
        return server.get("/metrics").body.decode("utf-8", "replace")
    except (ConfigError, EngineUnreachableError):
        return ""


def replicas_in(metrics: str) -> int:
    """Return of how many data-parallel replicas a server's metrics tell, at least 1."""
    return len({line["engine"] for line in _ENGINE.finditer(metrics)}) or 1


def adapters_in(metrics: str) -> frozenset[str] | None:
    """Return the adapters in use according to metrics in the text format, None if those do not say.

    All data-parallel replicas write this metric, and no line says whose it is: the newest lacks what others use.
    """
    if _METRIC not in metrics or replicas_in(metrics) > 1:
        return None
    newest = max(_METRIC_LINE.finditer(metrics), key=lambda line: _number(line["value"]), default=None)
    if newest is None:
        return frozenset()
    names = [
        label["value"] for label in _METRIC_LABEL.finditer(newest["labels"]) if label["name"] in _ADAPTERS
    ]
    return frozenset(name for text in names for name in text.split(",") if name)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
