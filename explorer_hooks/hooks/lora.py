"""lora: LoRA adapters in vLLM. Each version is an adapter with its own name, and nothing is paused.

An adapter's name contains its digest, so a rollout that names `policy-2.120.0f1e2d3c4b5a6978` runs that version to
its end. The newest adapter is what the engine runs; older ones are unloaded once no request uses them.

vLLM's metric `vllm:lora_requests_info` has one line for each set of adapters that was ever in use together; its value
is the last time of such use, so the line with the highest value is the newest. The engine writes it after each step:
it may still name an adapter whose last request has just ended, but never lacks one in use.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from explorer_hooks.hook import HookOptions, ProbeAnswer, Running
from explorer_hooks.hooks.adapters import BaseCheck, require_adapter
from explorer_hooks.hooks.http_engine import require_files
from explorer_hooks.hooks.http_settings import ServerHook
from explorer_hooks.hooks.probing import CompletionsProbe, each_replica
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory, WeightTensors

_LOG = "see the log of the vLLM server; --max-lora-rank must be at least the adapter's rank"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = re.compile(r"(\d{1,16})\.(\d{1,16})(?:\.[0-9a-f]{16})?", re.ASCII)
"""The part of an adapter's name behind the dash; earlier releases wrote the pair alone."""

_GONE = 404
_METRIC = "vllm:lora_requests_info"
_METRIC_LINE = re.compile(rf"^{_METRIC}{{(?P<labels>[^}}]*)}}\s+(?P<value>\S+)", re.MULTILINE)
_ENGINE = re.compile(r'^vllm:num_requests_running{[^}]*?engine="(?P<engine>\d+)"', re.MULTILINE)
_METRIC_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>[^"]*)"')
_ADAPTERS = frozenset({"running_lora_adapters", "waiting_lora_adapters"})


class LoraHook(ServerHook):
    """One vLLM server that serves adapters.

    Further settings: `name`: the prefix of adapters' names; `keep`: how many adapters
    stay loaded besides the newest; `drain`: seconds after which an adapter counts as unused if the engine does not
    say what it uses; `base`: the directory on this host of the model that the server was started with, if the server
    names another one.

    Args:
        options: The hook's options.

    Raises:
        ConfigError: An option is wrong.
    """

    name = "lora"
    kinds: ClassVar[frozenset[str]] = frozenset({"lora"})
    default_address = "http://127.0.0.1:8000"
    missing = (
        "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, "
        "on 127.0.0.1"
    )

    def __init__(self, options: HookOptions) -> None:
        super().__init__(options)
        self._base = BaseCheck(self._base_directory)
        self._loading: str | None = None
        self._superseded: dict[str, float] = {}

    def _configure(self, settings: HookSettings) -> None:
        self._prefix = settings.text("name", "policy")
        if not _NAME.fullmatch(self._prefix):
            problem = f"name={self._prefix} cannot begin an adapter's name"
            raise ConfigError(problem, hint="letters, digits, dot, dash, underscore")
        self._keep, self._drain = settings.count("keep", 2), settings.seconds("drain", 600.0)
        self._named_base = settings.text("base", "")

    def adapter_name(self, target: WeightDirectory) -> str:
        """Return the name under which requests use a version: it is the `model` of an OpenAI-compatible request."""
        return self.name_of(target.label)

    def name_of(self, label: str) -> str:
        """Return the name under which requests use the version of a label."""
        return f"{self._prefix}-{label}"

    def prepare(self, target: WeightDirectory) -> None:
        """Check that the adapter is whole and that the engine can load adapters at run time."""
        require_files(self, target)
        require_adapter(target)
        self._listed()
        self._base.require(target)
        # A request that names no adapter: a server that can load adapters refuses it, others do not know the path.
        self._server.post_any(_LOAD, {"lora_name": "", "lora_path": ""})

    def load(self, target: WeightDirectory) -> None:
        """Load the adapter under its own name; other adapters are still served."""
        name, path = self.adapter_name(target), self._paths.there(target.path)
        listed = self._listed()
        if listed.get(name) == path:
            return
        self._loading = name
        if name in listed:
            self._unload(name)
        self._server.post(_LOAD, {"lora_name": name, "lora_path": path}, hint=_LOG)

    def commit(self, target: WeightDirectory) -> None:
        """Check that the engine lists the adapter, and unload those that are no longer used."""
        name = self.adapter_name(target)
        listed = self._versions()
        if name not in listed:
            raise LoadFailedError(
                f"vLLM loaded {name} and does not list it", path=self._server.address, hint=_LOG
            )
        self._withdraw(listed, target)
        self._retire(listed, target.version.pair)
        self._loading = None

    def current_version(self) -> Running:
        """Return the newest adapter that the engine lists. Nothing is ever paused."""
        listed = self._versions()
        newest = max(listed, key=lambda name: (listed[name], name), default=None)
        return Running(None if newest is None else newest.removeprefix(f"{self._prefix}-"))

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Ask each replica under the adapter's name; vLLM's cache keeps names apart, so it needs no check."""
        name = self.adapter_name(target) if isinstance(target, WeightDirectory) else None
        servers = each_replica(self._server, replicas_in(_metrics(self._server)))
        first, *others = [ProbeAnswer(CompletionsProbe(one, name).log_probs(tokens)) for one in servers]
        return first._replace(others=tuple(others))

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Unload the failed adapter; the last good one was not touched, and is loaded again only if it is missing."""
        if last_good is not None:
            listed = self._versions()
            if self.adapter_name(last_good) not in listed:
                with self._restoring(last_good.label, "restart the vLLM server"):
                    self.load(last_good)
            self._withdraw(listed, last_good)
        elif self._loading is not None and self._loading in self._versions():
            self._unload(self._loading)
        self._loading = None

    def _withdraw(self, listed: dict[str, Pair], target: WeightDirectory) -> None:
        """Unload versions after the one that is to run, and others of its number.

        A running request keeps its adapter in the engine until it ends; new ones can no longer name it.
        """
        pair, own = target.version.pair, self.adapter_name(target)
        for name in [name for name, other in listed.items() if other >= pair and name != own]:
            self._unload(name)

    def _retire(self, listed: dict[str, Pair], pair: Pair) -> None:
        """Unload old versions that no request uses, except the newest `keep`."""
        older = sorted((name for name in listed if listed[name] < pair), key=lambda name: listed[name])
        now = time.monotonic()
        self._superseded = {name: self._superseded.get(name, now) for name in older}
        surplus = older[: max(0, len(older) - self._keep)]
        if not surplus:
            return
        used = in_use(self._server)
        for name in surplus:
            idle = now - self._superseded[name] >= self._drain if used is None else name not in used
            if idle:
                # The next commit tries again: an old adapter too many does no harm to the new one.
                with contextlib.suppress(LoadFailedError):
                    self._unload(name)

    def _unload(self, name: str) -> None:
        reply = self._server.post_any(_UNLOAD, {"lora_name": name})
        if reply.is_error and reply.status != _GONE:
            raise LoadFailedError(self._server.complaint(reply), path=self._server.address, hint=_LOG)

    def _versions(self) -> dict[str, Pair]:
        """Return the adapters that this hook names, those of earlier releases too, by name."""
        found: dict[str, Pair] = {}
        for name in self._listed():
            prefix, dash, label = name.rpartition("-")
            version = _LABEL.fullmatch(label)
            if prefix == self._prefix and dash and version is not None:
                found[name] = int(version[1]), int(version[2])
        return found

    def _listed(self) -> dict[str, str]:
        """Return the path of each model and adapter by name."""
        return {str(one.get("id")): str(one.get("root")) for one in self._models()}

    def _models(self) -> list[dict[str, Any]]:
        """Return what the server says of its models and adapters; an adapter has a parent."""
        models = self._server.get_json("/v1/models").get("data")
        if not isinstance(models, list):
            raise EngineUnreachableError("/v1/models is not answered as vLLM does", path=self._server.address)
        return [one for one in models if isinstance(one, dict)]

    def _base_directory(self) -> str:
        """Return the directory of the model that the server was started with, empty if it cannot be read here."""
        roots = [str(one.get("root")) for one in self._models() if not one.get("parent")]
        found = self._named_base or (roots[0] if roots else "")
        return found if os.path.isdir(found) else ""


def in_use(server: HttpClient) -> frozenset[str] | None:
    """Return the adapters that requests use or wait for, None if the engine does not say."""
    return adapters_in(_metrics(server))


def _metrics(server: HttpClient) -> str:
    """Return a server's metrics in the text format, empty if it gives none."""
    try:
        return server.get("/metrics").body.decode("utf-8", "replace")
    except (ConfigError, EngineUnreachableError):
        return ""


def replicas_in(metrics: str) -> int:
    """Return of how many data-parallel replicas a server's metrics tell, at least 1."""
    return len({line["engine"] for line in _ENGINE.finditer(metrics)}) or 1


def adapters_in(metrics: str) -> frozenset[str] | None:
    """Return the adapters in use according to metrics in the text format, None if those do not say."""
    if _METRIC not in metrics:
        return None
    newest = max(_METRIC_LINE.finditer(metrics), key=lambda line: _number(line["value"]), default=None)
    if newest is None:
        return frozenset()
    names = [one["value"] for one in _METRIC_LABEL.finditer(newest["labels"]) if one["name"] in _ADAPTERS]
    return frozenset(name for text in names for name in text.split(",") if name)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
